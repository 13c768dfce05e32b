"""Rows that are augmented with random numbers, and a network with dropout, to compare runs bit for bit."""

import random
from itertools import chain
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

import drivetrain

ROWS = 46
TOTAL_BATCH = 8
STEPS = -(-ROWS // TOTAL_BATCH)
"""The number of steps per epoch, independent of the number of workers. The last one repeats two rows."""


class NoisyRows(Dataset[Any]):
    """Numbered rows with noise from the generators of Python, NumPy and torch."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        noise = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
        return {"x": torch.tensor([number / ROWS, noise]), "labels": torch.tensor([number / ROWS])}


def numbers_of(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return the numbers of the rows in a batch."""
    return [round(float(label) * ROWS) for label in batch["labels"].flatten()]


class NoisyNetwork(torch.nn.Module):
    """A network with dropout. The parameters are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x)
        return {"loss": (predicted - labels).square().mean(), "predicted": predicted}


def seed_each_rank() -> None:
    """Seed the generators, differently on each rank."""
    rank = drivetrain.get_context().get_world_rank()
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)


def batch_size() -> int:
    """Return the batch size of one worker. That of all workers together does not depend on their number."""
    return TOTAL_BATCH // drivetrain.get_context().get_world_size()


def parameters_of(module: torch.nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in module.parameters()]


def gathered(steps: list[list[int]]) -> list[list[int]]:
    """Return the rows that all ranks together have read in each step."""
    ranks = drivetrain.get_context().get_world_size()
    if ranks == 1:
        return steps
    by_rank: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(by_rank, steps)
    return [list(chain(*rows)) for rows in zip(*by_rank, strict=True)]
