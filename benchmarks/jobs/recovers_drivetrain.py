"""A worker of a DDP job is killed, on drivetrain; with ``--nodes 2`` one of two Ray nodes, of an elastic run."""

import contextlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from nodes import cluster_of
from recovering import STATE, recover
from stamps import options, stamp

import drivetrain
from drivetrain import Callback, Checkpoint, FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


class Stamps(Callback):
    """Stamps the stages of the controller."""

    def on_group_start(self, run, attempt, workers):
        stamp(config, "group_started", attempt=attempt)

    def on_group_stop(self, run, attempt):
        stamp(config, "noticed", attempt=attempt)

    def on_failure(self, run, failure, retrying):
        stamp(config, "group_ended")


def train_func(config):
    def save(state):
        if dist.get_rank() != 0:
            drivetrain.report({})
            return
        with tempfile.TemporaryDirectory() as directory:
            torch.save(state, Path(directory, STATE))
            drivetrain.report({}, Checkpoint.from_directory(directory))

    def load():
        checkpoint = drivetrain.get_checkpoint()
        return None if checkpoint is None else Path(checkpoint.path, STATE)

    recover(config, save, load)


if __name__ == "__main__":
    config = options(runtime="local", spares=0, nodes=0)
    number = (1, 2) if config["nodes"] else 2
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=number, runtime=config["runtime"], spare_workers=config["spares"]),
        run_config=RunConfig(
            storage_path=config["storage"], failure_config=FailureConfig(max_failures=1), callbacks=[Stamps()]
        ),
    )
    with cluster_of(config["nodes"]) if config["nodes"] else contextlib.nullcontext():
        trainer.fit()
