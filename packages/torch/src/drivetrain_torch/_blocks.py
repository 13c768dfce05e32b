"""The order of a data loader that Accelerate has split among the ranks.

Accelerate gives each rank every n-th batch of the order, where ``DistributedSampler`` gives it every n-th row. This
module reads the public attributes of Accelerate's samplers, but does not import Accelerate.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from drivetrain.plugin.backends import is_instance_of

__all__ = ["innermost_sampler", "is_split_in_batches", "repeated_rows_of_batches", "rest_in_batches", "seed_of"]

_MODULE = "accelerate.data_loader"


def is_split_in_batches(sampler: Any) -> bool:
    """Return True for a sampler of Accelerate that gives this rank its part of the batches of another sampler."""
    # With split_batches, it divides each batch among the ranks instead.
    return is_instance_of(sampler, _MODULE, "BatchSamplerShard") and not sampler.split_batches


def innermost_sampler(sampler: Any) -> Any:
    """Return the sampler of single rows that a sampler of batches contains."""
    if is_instance_of(sampler, _MODULE, "BatchSamplerShard"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)


def seed_of(sampler: Any) -> int | None:
    """Return the seed from which a sampler of Accelerate draws the order of the next epoch; None for another order."""
    if not is_instance_of(sampler, _MODULE, "SeedableRandomSampler") or sampler.replacement:
        return None
    return int(sampler.initial_seed + sampler.epoch)


@dataclass(frozen=True, eq=False)
class _RestOfRows(Sampler[int]):
    """The rows of an order after the first ones."""

    rows: Iterable[int]
    total: int
    start: int

    def __len__(self) -> int:
        return self.total - self.start

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.rows, self.start, None)


def rest_in_batches(given: Any, rows: Iterable[int], total: int, start: int) -> Any:
    """Return a copy of a sampler that :func:`is_split_in_batches` for the rest of an order."""
    batches = copy.copy(given)
    batches.batch_sampler = BatchSampler(_RestOfRows(rows, total, start), given.batch_size, given.drop_last)
    return batches


def repeated_rows_of_batches(sampler: Any) -> int:
    """Return the number of rows at the end of the last batch of this rank that another batch contains as well."""
    inner = sampler.batch_sampler
    if sampler.drop_last or not sampler.even_batches or not sampler.batch_size or not hasattr(inner, "sampler"):
        return 0
    size = int(sampler.batch_size)
    of_last_step = len(inner.sampler) - (len(sampler) - 1) * size * sampler.num_processes
    return size - int(min(max(of_last_step - sampler.process_index * size, 0), size))
