"""Where an epoch stands in a dataset, in terms that hold for another number of workers too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from drivetrain import ConfigurationError
from drivetrain_data._batches import batch_sizes, shuffled

__all__ = ["BatchPlan", "Interval", "Position", "Progress", "split_rows"]

T = TypeVar("T")
Interval = tuple[int, int]
"""Rows of a dataset, from a first one to the one before another."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a shard's rows become batches.

    Attributes:
        batch_size: rows of a batch; None for all in one.
        drop_last: leave out what does not fill a batch.
        buffer_rows: of the buffer within which rows are mixed; None to keep their order.
        seed: of the order; None for another one each time.
    """

    batch_size: int | None
    drop_last: bool
    buffer_rows: int | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Position:
    """Which rows of an epoch were seen, on all ranks: each has had as many batches.

    Attributes:
        total: rows of the dataset; None where only reading tells.
        world_size: ranks among which they are split.
        rows: of which the epoch consists; None for all.
        batches: that each rank has had.
        plan: how they were made; None where there were none.
    """

    total: int | None
    world_size: int
    rows: tuple[Interval, ...] | None = None
    batches: int = 0
    plan: BatchPlan | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same in plain values."""
        plan = self.plan
        return {
            "total": self.total,
            "world_size": self.world_size,
            "rows": None if self.rows is None else [list(interval) for interval in self.rows],
            "batches": self.batches,
            "plan": plan and [plan.batch_size, plan.drop_last, plan.buffer_rows, plan.seed],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """The position that a dict was made of.

        Raises:
            ConfigurationError: it was made of something else.
        """
        try:
            rows, plan = state["rows"], state["plan"]
            return cls(
                total=state["total"],
                world_size=state["world_size"],
                rows=None if rows is None else tuple((start, stop) for start, stop in rows),
                batches=state["batches"],
                plan=None if plan is None else BatchPlan(*plan),
            )
        except (KeyError, TypeError, ValueError):
            raise ConfigurationError(
                f"load_state_dict() wants what state_dict() has returned, found {state!r}"
            ) from None

    def unseen(self) -> list[Interval]:
        """The rows that no rank has seen, in order."""
        assert self.total is not None
        parts = split_rows(self.rows or [(0, self.total)], self.world_size)
        if self.plan is None:
            return list(itertools.chain.from_iterable(parts))
        sizes = [sum(stop - start for start, stop in part) for part in parts]
        unseen: list[Interval] = []
        for part, rows in zip(parts, sizes, strict=True):
            seen = rows_of_batches(self.plan, rows, max(sizes), min(sizes), self.batches)
            if not seen or self.plan.buffer_rows is None:
                unseen += _within(part, [(seen, rows)])
            else:
                unseen += _within(part, _unseen_of_shuffled(rows, self.plan, seen))
        return unseen


def split_rows(rows: Sequence[Interval], world_size: int) -> list[list[Interval]]:
    """Contiguous parts of some rows, as even as can be."""
    total = sum(stop - start for start, stop in rows)
    bounds = [total * rank // world_size for rank in range(world_size + 1)]
    return [_within(rows, [(start, stop)]) for start, stop in pairwise(bounds)]


def rows_of_batches(plan: BatchPlan, rows: int, largest_shard: int, smallest_shard: int, batches: int) -> int:
    """How many rows of a shard are in its first batches."""
    sizes = batch_sizes(rows, largest_shard, plan.batch_size, drop_last=plan.drop_last, smallest_shard=smallest_shard)
    return sum(itertools.islice(sizes, batches))


def _within(rows: Sequence[Interval], places: Sequence[Interval]) -> list[Interval]:
    """Of some rows, those at some places in them; both in order."""
    found: list[Interval] = []
    position = 0
    waiting = iter(places)
    place = next(waiting, None)
    for start, stop in rows:
        while place is not None and place[0] < position + stop - start:
            first, last = max(place[0] - position, 0), min(place[1] - position, stop - start)
            if first < last:
                found.append((start + first, start + last))
            if place[1] > position + stop - start:
                break
            place = next(waiting, None)
        position += stop - start
    return found


def _unseen_of_shuffled(rows: int, plan: BatchPlan, seen: int) -> list[Interval]:
    import numpy as np
    import pyarrow as pa

    assert plan.buffer_rows is not None
    numbers = pa.table({"row": np.arange(rows)})
    order = np.concatenate(
        [table["row"].to_numpy() for table in shuffled(iter([numbers]), plan.buffer_rows, plan.seed)]
    )
    unseen = np.sort(order[seen:])
    gaps = np.flatnonzero(np.diff(unseen) != 1)
    starts, stops = [0, *(gaps + 1)], [*(gaps + 1), len(unseen)]
    return [(int(unseen[start]), int(unseen[stop - 1]) + 1) for start, stop in zip(starts, stops, strict=True) if stop]


@dataclass(slots=True)
class Progress:
    """What a shard remembers of its epochs.

    Attributes:
        continued: the position that the next epoch goes on from; None to begin anew.
        now: the position in the latest epoch; None before one and after its end.
        last_state: the last return value of ``state_dict()``, until the session takes it.
    """

    continued: Position | None = None
    now: Position | None = None
    last_state: dict[str, Any] | None = field(default=None)

    def counted(self, position: Position, epoch: Iterator[T]) -> Iterator[T]:
        """The batches of an epoch, each counted when it is handed over."""
        batches = position.batches
        self.now = mine = position
        for batch in epoch:
            batches += 1
            if self.now is mine:
                self.now = mine = Position(position.total, position.world_size, position.rows, batches, position.plan)
            yield batch
        if self.now is mine:
            self.now = None
