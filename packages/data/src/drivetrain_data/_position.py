"""The position in an epoch of a dataset. Any number of workers can split the rows that are unread at a position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from drivetrain import ConfigurationError, heartbeat
from drivetrain.plugin.datasets import note_batch
from drivetrain_data._plan import BatchPlan, Interval, count_rows, select_rows, split_rows
from drivetrain_data._tables import shuffle

__all__ = ["EpochState", "Position"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """How far the ranks together have read an epoch. Every rank has read the same number of batches.

    Attributes:
        total: the number of rows in the dataset; None if it is unknown until all rows are read.
        world_size: the number of shards into which the epoch was split.
        remaining_rows: the rows of the rest of the epoch, if this rest was split again; None for all rows of the
            dataset.
        batches: the number of batches that each rank has read.
        plan: the options that determine the batches; None if no batch was read.
        epoch: the number of epochs that were started before this one. It determines the order of a shuffled stream.
    """

    total: int | None
    world_size: int
    remaining_rows: tuple[Interval, ...] | None = None
    batches: int = 0
    plan: BatchPlan | None = None
    epoch: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the position as values that JSON can represent."""
        plan = self.plan
        return {
            "total": self.total,
            "world_size": self.world_size,
            "rows": None if self.remaining_rows is None else [list(interval) for interval in self.remaining_rows],
            "batches": self.batches,
            "plan": plan and [plan.batch_size, plan.drop_last, plan.buffer_rows, plan.seed],
            "epoch": self.epoch,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """Return the position that a return value of :meth:`as_dict` describes.

        Raises:
            ConfigurationError: the argument was not created by :meth:`as_dict`.
        """
        try:
            rows, plan = state["rows"], state["plan"]
            return cls(
                total=state["total"],
                world_size=state["world_size"],
                remaining_rows=None if rows is None else tuple((start, stop) for start, stop in rows),
                batches=state["batches"],
                plan=None if plan is None else BatchPlan(*plan),
                epoch=state.get("epoch", 0),
            )
        except (KeyError, TypeError, ValueError):
            raise ConfigurationError(
                f"[DT-746] load_state_dict(): expected the return value of state_dict(), got {state!r}"
            ) from None

    def unread(self) -> list[Interval]:
        """Return the rows that no rank has read, in order."""
        assert self.total is not None
        shards = split_rows(self.remaining_rows or [(0, self.total)], self.world_size)
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
    """Return the positions of the unread rows in a shuffled shard, found by shuffling the row numbers in the same way.

    Args:
        rows: the number of rows in the shard.
        read: the number of rows that were read.
        buffer_rows: see :class:`~drivetrain_data._plan.BatchPlan`.
        seed: see :class:`~drivetrain_data._plan.BatchPlan`.
    """
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
    """The state of a shard that changes while the shard is read.

    Attributes:
        resume_from: the position at which the next iteration starts; None to read an epoch from its first row.
        current: the position in the latest epoch; None before the first epoch and after the end of an epoch.
        epoch: the number of the next epoch that starts with its first row.
        last_saved: the last return value of ``state_dict()``; None after ``take_state()`` has returned it.
    """

    resume_from: Position | None = None
    current: Position | None = None
    epoch: int = 0
    last_saved: dict[str, Any] | None = None

    def track(self, start: Position, batches: Iterator[T], *, reads_ahead: bool = False) -> Iterator[T]:
        """Yield the batches of an epoch, and update the current position.

        When a batch is yielded, the position already includes this batch. The position is no longer updated after a
        later epoch or a loaded state has replaced it.

        Args:
            start: the position before the first batch.
            batches: the batches.
            reads_ahead: True if the caller takes batches long before they are used. The position is then ``start``
                until the end of the epoch: a resumed run reads some rows again, but never leaves out rows.
        """
        self.current = latest = start
        for number, batch in enumerate(batches, start.batches + 1):
            if self.current is latest and not reads_ahead:
                self.current = latest = Position(
                    start.total, start.world_size, start.remaining_rows, number, start.plan, start.epoch
                )
            heartbeat()
            note_batch(batch, number - 1)
            yield batch
        if self.current is latest:
            self.current = None
