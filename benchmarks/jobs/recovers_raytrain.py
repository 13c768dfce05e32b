"""A worker of a DDP job is killed, on Ray Train; with ``--nodes 2`` one of two nodes, of an elastic run."""

import contextlib
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from nodes import cluster_of
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
    config = options(nodes=0)
    number = (1, 2) if config["nodes"] else 2
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=number),
        run_config=RunConfig(storage_path=config["storage"], failure_config=FailureConfig(max_failures=1)),
    )
    with cluster_of(config["nodes"]) if config["nodes"] else contextlib.nullcontext():
        trainer.fit()
