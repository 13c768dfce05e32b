"""Steps of one worker with checkpoints in the background, on drivetrain."""

from pathlib import Path

import torch
from saving import clear
from stamps import options
from steps_saving import train

import drivetrain
from drivetrain import Checkpoint, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


def train_func(config):
    torch.set_num_threads(1)
    newest = None

    def report(source):
        nonlocal newest
        newest = drivetrain.get_checkpoint()
        drivetrain.report(
            {"loss": 0.5},
            Checkpoint.from_directory(source),
            checkpoint_upload_mode="async",
            delete_local_checkpoint_after_upload=True,
        )

    def is_stored():
        return drivetrain.get_checkpoint() != newest

    def settle():
        path = Path(drivetrain.get_checkpoint().path)
        clear(path if path.is_absolute() else Path(config["served"]) / path)

    train(config, report, is_stored, settle)


if __name__ == "__main__":
    config = options(data="", give="", uri="", served="", repeats=1, seconds=1.5)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(storage_path=config["uri"]),
    )
    trainer.fit()
