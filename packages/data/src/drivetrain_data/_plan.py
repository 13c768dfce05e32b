"""Splits rows among the ranks, and each rank's rows into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["BatchPlan", "Interval", "count_rows", "select_rows", "split_rows"]

Interval = tuple[int, int]
"""A range of row numbers: the first row of the range, and the row after the last one."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The options that determine the batches of a shard.

    Attributes:
        batch_size: the number of rows in a batch; None for all rows in one batch.
        drop_last: drop the last batch if it is not full.
        buffer_rows: the size of the shuffle buffer in rows; None to keep the order of the rows.
        seed: the seed of the shuffled order; None for a different order in each epoch.
    """

    batch_size: int | None
    drop_last: bool
    buffer_rows: int | None
    seed: int | None

    def batch_sizes(self, rows: int, *, largest_shard: int, smallest_shard: int) -> Iterator[int]:
        """Return the sizes of a shard's batches. Every rank gets the same number of batches.

        Collective operations require the same number on every rank. The sizes of the shards differ by at most one row.
        If this row causes an additional batch on some ranks, the other ranks divide their last batch into two. A batch
        of one row cannot be divided: with a ``batch_size`` of 1, the numbers of batches can differ by one.

        Args:
            rows: the number of rows in this shard.
            largest_shard: the number of rows in the largest shard.
            smallest_shard: the number of rows in the smallest shard.
        """
        size = self.batch_size
        if size is None:
            return iter([rows] if rows else [])
        if self.drop_last:
            return itertools.repeat(size, smallest_shard // size)
        full_batches, last_rows = divmod(rows, size)
        sizes = [size] * full_batches + [last_rows] * bool(last_rows)
        largest_count = -(-largest_shard // size)
        if sizes and len(sizes) < largest_count and sizes[-1] > 1:
            sizes[-1:] = [sizes[-1] - 1, 1]
        return iter(sizes)


def count_rows(intervals: Sequence[Interval]) -> int:
    """Return the total number of rows in the intervals."""
    return sum(stop - start for start, stop in intervals)


def split_rows(intervals: Sequence[Interval], shards: int) -> list[list[Interval]]:
    """Split rows into contiguous shards whose sizes differ by at most one row.

    Args:
        intervals: the rows, in order.
        shards: the number of shards.
    """
    rows = count_rows(intervals)
    bounds = [rows * rank // shards for rank in range(shards + 1)]
    return [select_rows(intervals, [(start, stop)]) for start, stop in pairwise(bounds)]


def select_rows(intervals: Sequence[Interval], selection: Sequence[Interval]) -> list[Interval]:
    """Return the rows at the given positions: ``select_rows([(10, 20)], [(2, 5)]) == [(12, 15)]``.

    Args:
        intervals: the rows to select from, in order.
        selection: ranges of positions, in order. Position 0 is the first row of the first interval, and positions are
            counted across all intervals.
    """
    selected: list[Interval] = []
    offset = 0  # the position of the first row of the current interval
    remaining = iter(selection)
    current = next(remaining, None)
    for start, stop in intervals:
        rows = stop - start
        while current is not None and current[0] < offset + rows:
            first, last = max(current[0] - offset, 0), min(current[1] - offset, rows)
            if first < last:
                selected.append((start + first, start + last))
            if current[1] > offset + rows:
                break
            current = next(remaining, None)
        offset += rows
    return selected
