"""DDP steps on drivetrain, with a report of each."""

import torch.distributed as dist
from ddp import train
from stamps import options

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


def train_func(config):
    train(config, dist.get_rank(), drivetrain.report)


if __name__ == "__main__":
    config = options(steps=800)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
