"""A worker without a framework that reports checkpoints on the disk it saves to, on Ray Train."""

import time
from functools import partial
from pathlib import Path

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from saving import clear, in_turn, seconds, warm
from stamps import options

POLL_S = 2.5  # its driver has polled by then, so the next report does not wait for it


def train_func(config):
    def report(source):
        warm(source)
        taken = seconds(ray.train.report, {"loss": 0.5}, Checkpoint.from_directory(source))
        time.sleep(POLL_S)
        clear(*Path(config["storage"]).glob("*/checkpoint_*"))
        return taken

    for source in sorted(Path(config["data"]).iterdir()):
        in_turn(config, source.name, {"Ray Train": partial(report, source)})


if __name__ == "__main__":
    config = options(data="", repeats=1)
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
