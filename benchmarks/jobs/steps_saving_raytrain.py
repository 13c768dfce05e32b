"""Steps of one worker with checkpoints in the background, on Ray Train."""

import time
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from saving import clear
from stamps import options
from steps_saving import train

POLL_S = 2.5  # its driver has polled by then, so the next report does not wait for it


def train_func(config):
    torch.set_num_threads(1)
    given = None

    def report(source):
        nonlocal given
        given = source
        ray.train.report(
            {"loss": 0.5},
            Checkpoint.from_directory(source),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def settle():
        time.sleep(POLL_S)
        clear(*Path(config["uri"]).glob("*/checkpoint_*"))

    train(config, report, lambda: not given.exists(), settle)


if __name__ == "__main__":
    config = options(data="", give="", uri="", repeats=1, seconds=1.5)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=config["uri"]),
    )
    trainer.fit()
