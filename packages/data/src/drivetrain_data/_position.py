"""How far an epoch of a dataset has been read, in terms that also hold for another number of workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from drivetrain import ConfigurationError
from drivetrain_data._plan import BatchPlan, Interval, count_rows, select_rows, split_rows
from drivetrain_data._tables import shuffle

__all__ = ["EpochState", "Position"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """The rows of an epoch that were read on all ranks. Every rank has read the same number of batches.

    Attributes:
        total: the rows of the dataset; None if only reading reveals their number.
        world_size: the number of shards.
        intervals: the rows of the epoch; None for all rows of the dataset.
        batches: the number of batches that each rank has read.
        plan: how the batches were made; None if there were none.
    """

    total: int | None
    world_size: int
    intervals: tuple[Interval, ...] | None = None
    batches: int = 0
    plan: BatchPlan | None = None

    def as_dict(self) -> dict[str, Any]:
        """The position as values that JSON can represent."""
        plan = self.plan
        return {
            "total": self.total,
            "world_size": self.world_size,
            "rows": None if self.intervals is None else [list(interval) for interval in self.intervals],
            "batches": self.batches,
            "plan": plan and [plan.batch_size, plan.drop_last, plan.buffer_rows, plan.seed],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """The position that :meth:`as_dict` was called on.

        Raises:
            ConfigurationError: the dict does not come from :meth:`as_dict`.
        """
        try:
            rows, plan = state["rows"], state["plan"]
            return cls(
                total=state["total"],
                world_size=state["world_size"],
                intervals=None if rows is None else tuple((start, stop) for start, stop in rows),
                batches=state["batches"],
                plan=None if plan is None else BatchPlan(*plan),
            )
        except (KeyError, TypeError, ValueError):
            raise ConfigurationError(
                f"load_state_dict(): expected what state_dict() has returned, got {state!r}"
            ) from None

    def unread(self) -> list[Interval]:
        """The rows that no rank has read, in order."""
        assert self.total is not None
        shards = split_rows(self.intervals or [(0, self.total)], self.world_size)
        if self.plan is None:
            return list(itertools.chain.from_iterable(shards))
        sizes = [count_rows(shard) for shard in shards]
        unread: list[Interval] = []
        for shard, rows in zip(shards, sizes, strict=True):
            batch_sizes = self.plan.batch_sizes(rows, largest_shard=max(sizes), smallest_shard=min(sizes))
            read = sum(itertools.islice(batch_sizes, self.batches))
            if not read or self.plan.buffer_rows is None:
                unread += select_rows(shard, [(read, rows)])
            else:
                unread += select_rows(shard, _unread_of_shuffled(rows, read, self.plan.buffer_rows, self.plan.seed))
        return unread


def _unread_of_shuffled(rows: int, read: int, buffer_rows: int, seed: int | None) -> list[Interval]:
    """The rows of a shuffled shard that remain after the first ones are read, found by shuffling their numbers."""
    import numpy as np
    import pyarrow as pa

    numbers = pa.table({"row": np.arange(rows)})
    order = np.concatenate([table["row"].to_numpy() for table in shuffle(iter([numbers]), buffer_rows, seed)])
    unread = np.sort(order[read:])
    gaps = np.flatnonzero(np.diff(unread) != 1)
    starts, stops = [0, *(gaps + 1)], [*(gaps + 1), len(unread)]
    return [(int(unread[start]), int(unread[stop - 1]) + 1) for start, stop in zip(starts, stops, strict=True) if stop]


@dataclass(slots=True)
class EpochState:
    """The part of a shard that changes while it is read.

    Attributes:
        resume_from: the position at which the next epoch starts; None for its first row.
        current: the position in the latest epoch; None before the first epoch and after the end of one.
        last_saved: the last return value of ``state_dict()``, until the session takes it.
    """

    resume_from: Position | None = None
    current: Position | None = None
    last_saved: dict[str, Any] | None = None

    def track(self, start: Position, batches: Iterator[T]) -> Iterator[T]:
        """Yields the batches of an epoch and updates the position, unless a later epoch or a loaded state replaced it.

        Args:
            start: the position before the first of these batches.
            batches: the batches.
        """
        self.current = latest = start
        for number, batch in enumerate(batches, start.batches + 1):
            if self.current is latest:
                self.current = latest = Position(start.total, start.world_size, start.intervals, number, start.plan)
            yield batch
        if self.current is latest:
            self.current = None
