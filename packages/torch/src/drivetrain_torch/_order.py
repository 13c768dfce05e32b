"""The order in which a data loader reads the rows of an epoch, and the part of a rank in the rest of this order.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from drivetrain_torch._blocks import (
    innermost_sampler,
    is_split_in_batches,
    repeated_rows_of_batches,
    rest_in_batches,
    seed_of,
)
from drivetrain_torch._generators import own_generators
from drivetrain_torch._sampling import index_sampler
from drivetrain_torch._twice import ShardSampler

__all__ = [
    "KNOWN",
    "Order",
    "RestOfOrder",
    "changes_batches",
    "order_of",
    "rest_of_epoch",
    "samples_in",
    "takes_state",
]

KNOWN = ("sequence", "seed", "torch", "loader", "sampler")
"""The orders that can be reproduced without the sampler of the loader, so that other ranks can read the rest."""


class Order(NamedTuple):
    """The order of a loader.

    Attributes:
        kind: ``"sequence"``: the rows in order. ``"seed"``: the permutation that ``DistributedSampler`` draws from
            ``seed``. ``"torch"``, ``"loader"`` or ``"sampler"``: the permutation that ``RandomSampler`` draws from the
            generator of this name. ``"stateful"``: that of a sampler with a method ``state_dict``. ``"stream"``: that
            of an iterable dataset. ``"other"``: that of any other sampler.
        total: the number of rows in the dataset; None for a stream.
        seed: see above.
        shards: the number of ranks among which the order is split.
        rank: the part that this loader reads.
        batch_size: the number of rows in a batch; None if it is unknown.
        drop_last: drop the last batch if it is not full.
        drops_rows: drop the rows that do not divide evenly among the ranks; otherwise, repeat some rows.
    """

    kind: str
    total: int | None
    seed: int | None = None
    shards: int = 1
    rank: int = 0
    batch_size: int | None = None
    drop_last: bool = False
    drops_rows: bool = False


def order_of(loader: DataLoader[Any], world_size: int) -> Order:
    """Return the order of a loader.

    Args:
        loader: the loader.
        world_size: the number of workers, which matters if the order is unknown: the user's code may shard the data.
    """
    if isinstance(loader.dataset, IterableDataset):
        return Order("stream", None, None, world_size, 0, loader.batch_size, loader.drop_last)
    total = len(loader.dataset)  # type: ignore[arg-type]
    given = index_sampler(loader)
    sampler = innermost_sampler(given)
    size, drop_last = (given.batch_size, given.drop_last) if isinstance(given, BatchSampler) else (1, False)
    if not changes_batches(loader):
        if any(map(takes_state, (given, sampler))):
            return Order("stateful", total, None, world_size, 0, size, drop_last)
        if type(given) is BatchSampler or not isinstance(given, BatchSampler):
            known = _known_order(loader, sampler, {"total": total, "batch_size": size, "drop_last": drop_last})
            if known is not None:
                return known
        if is_split_in_batches(given) and type(given.batch_sampler) is BatchSampler:
            known = _known_order(loader, sampler, {"total": total, "batch_size": size, "drop_last": drop_last})
            if known is not None:
                return known._replace(shards=given.num_processes, rank=given.process_index, drops_rows=drop_last)
    return Order("other", total, None, world_size, 0, size, drop_last)


def _known_order(loader: DataLoader[Any], sampler: Any, options: dict[str, Any]) -> Order | None:
    """Return the order of a sampler of torch that can be reproduced without it; None for another sampler."""
    total = options["total"]
    if type(sampler) in (ShardSampler, DistributedSampler) and len(sampler.dataset) == total:
        seed = sampler.seed + sampler.epoch if sampler.shuffle else None
        split = {"shards": sampler.num_replicas, "rank": sampler.rank, "drops_rows": sampler.drop_last}
        return Order("sequence" if seed is None else "seed", seed=seed, **split, **options)
    if type(sampler) is SequentialSampler and len(sampler) == total:
        return Order("sequence", **options)
    if (seed := seed_of(sampler)) is not None and len(sampler) == total:
        return Order("seed", seed=seed, **options)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == total:
        own = own_generators(loader)
        return Order("torch" if sampler.generator is None else "sampler" if "sampler" in own else "loader", **options)
    return None


def changes_batches(loader: DataLoader[Any]) -> bool:
    """Return True if the class of a loader has its own method ``__iter__``, which may change the batches."""
    kinds = (each for each in type(loader).__mro__ if each.__module__ != "drivetrain_torch._loader")
    return next(each for each in kinds if "__iter__" in vars(each)) is not DataLoader


def takes_state(value: Any) -> bool:
    """Return True if a value can save its own state."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


@dataclass(frozen=True, eq=False)
class RestOfOrder(Sampler[int]):
    """The rows that one rank reads in the rest of an epoch, padded in the same way as by ``DistributedSampler``.

    Attributes:
        rows: all rows of the epoch, in order.
        total: the number of these rows.
        start: the number of rows at the start of the order that have been read.
        rank: the part of the rest to read.
        shards: the number of parts.
        drops_rows: drop the rows that do not divide evenly among the parts; otherwise, repeat some rows.
    """

    rows: Iterable[int]
    total: int
    start: int
    rank: int
    shards: int
    drops_rows: bool

    def __len__(self) -> int:
        return samples_in(self.total - self.start, self.shards, drops_rows=self.drops_rows)

    def __iter__(self) -> Iterator[int]:
        rest = list(self.rows)[self.start :]
        return itertools.islice(itertools.cycle(rest), self.rank, len(self) * self.shards, self.shards)

    @property
    def repeated_rows(self) -> int:
        """The number of rows at the end that another rank reads as well, or that this rank has already read."""
        return max(len(self) - len(range(self.rank, self.total - self.start, self.shards)), 0)


def samples_in(rows: int, shards: int, *, drops_rows: bool) -> int:
    """Return the number of rows that each rank reads, which is the same for all ranks."""
    return rows // shards if drops_rows else -(-rows // shards)


def rest_of_epoch(loader: DataLoader[Any], order: Order, rows: Iterable[int], start: int) -> tuple[Any, int]:
    """Return the sampler for the rest of an epoch, of batches or rows, and the number of rows repeated at its end."""
    assert order.total is not None
    if is_split_in_batches(index_sampler(loader)):
        shard = rest_in_batches(index_sampler(loader), rows, order.total, start)
        return shard, repeated_rows_of_batches(shard)
    rest = RestOfOrder(rows, order.total, start, order.rank, order.shards, order.drops_rows)
    given = index_sampler(loader)
    if not isinstance(given, BatchSampler):
        return rest, rest.repeated_rows
    batches = copy.copy(given)
    batches.sampler = rest
    return batches, rest.repeated_rows
