"""A worker of a DDP job is killed, on Ray Train."""

import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from recovering import STATE, recover
from stamps import options


def train_func(config):
    def save(state):
        if dist.get_rank() != 0:
            ray.train.report({})
            return
        with tempfile.TemporaryDirectory() as directory:
            torch.save(state, Path(directory, STATE))
            ray.train.report({}, checkpoint=Checkpoint.from_directory(directory))

    def load():
        checkpoint = ray.train.get_checkpoint()
        return None if checkpoint is None else Path(checkpoint.path, STATE)

    recover(config, save, load)


if __name__ == "__main__":
    config = options()
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"], failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
