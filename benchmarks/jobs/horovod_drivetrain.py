"""Horovod steps on drivetrain, with a report of each."""

from horovod_steps import train
from stamps import options

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_horovod import HorovodTrainer


def train_func(config):
    train(config, drivetrain.report)


if __name__ == "__main__":
    config = options(steps=800)
    trainer = HorovodTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
