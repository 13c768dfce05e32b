"""The model that the jobs with gradients train: a small perceptron under DDP."""

import time
from collections.abc import Callable
from typing import Any

import torch
from stamps import stamp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, FEATURES, CLASSES = 256, 64, 10
WARMUP_STEPS = 400  # longer than the background work of either side after a start


def make_model(width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def make_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    return features, torch.randint(CLASSES, (BATCH,), generator=generator)


def backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


def train(config: dict[str, Any], rank: int, report: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
    """Train the configured number of steps, report each, and stamp the steps per second."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = make_batch(rank)
    for step in range(-WARMUP_STEPS, config["steps"]):
        if step == 0:
            started = time.perf_counter()
        optimizer.zero_grad()
        loss = backward(model, batch)
        optimizer.step()
        report({"loss": loss.item(), "step": step})
    stamp(config, "trained", steps_per_second=config["steps"] / (time.perf_counter() - started))
