"""Writes and reads the files of a sharded state without a run."""

import os
from typing import Any

import torch

from drivetrain_torch._sharded import write_parts
from drivetrain_torch._statefiles import Parts, TorchFiles

COMMON: dict[str, Any] = {"step": 0, "epoch": 0, "ranks": [{"random": {}, "data": {}}], "format": 1}
"""The entries that every checkpoint of a ``TrainState`` has."""


def save(directory: str | os.PathLike[str], model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Write this rank's part, also if the model is not sharded."""
    trained = {"optimizer": optimizers} if optimizers else {}
    write_parts(directory, {"model": model}, trained, COMMON, verify=True)


def load(directory: str | os.PathLike[str], model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Load a model and its optimizers, or the model alone."""
    files = TorchFiles(Parts.of({"model": model, "optimizer": optimizers or None}))
    files.read(os.fspath(directory), only_parameters=not optimizers, strict=True)
