"""A small network and synthetic data, used by most checks. It imports torch, so checks import it only in functions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

FEATURES, CLASSES = 64, 10


def make_data(count: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Return linearly separable samples on the CPU, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    return features, (features @ teacher).argmax(1)


def make_model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def own_part(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the data, on a device."""
    features, labels = make_data()
    part = slice(dist.get_rank(), None, dist.get_world_size())
    return features[part].to(device), labels[part].to(device)


def train_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    forward: Callable[..., Any] | None = None,
) -> list[float]:
    """Train for a number of steps on one batch; return the losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy((forward or model)(batch[0]).float(), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks in the order of the ranks. Every rank must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
