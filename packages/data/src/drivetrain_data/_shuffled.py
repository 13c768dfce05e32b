"""Reads rows in an order that depends on a seed and on the epoch, but not on the number of workers."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain_data._plan import Interval, count_rows, select_rows
from drivetrain_data._shard import Reader
from drivetrain_data._tables import concatenate

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ShuffledReader", "divide"]

_BLOCKS_PER_WINDOW = 8


def divide(sizes: Sequence[int], window_rows: int) -> list[Interval]:
    """Return blocks of rows that are shuffled as a whole.

    Args:
        sizes: the number of rows in each part that can be read on its own, such as a row group of a Parquet file.
        window_rows: see :class:`ShuffledReader`.
    """
    largest = max(window_rows // _BLOCKS_PER_WINDOW, 1)
    blocks: list[Interval] = []
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        first = end - size
        blocks += [(start, min(start + largest, end)) for start in range(first, end, largest)]
    return blocks


@dataclass(frozen=True, slots=True)
class ShuffledReader:
    """Reads a part of a shuffled dataset.

    The order of an epoch is determined in two steps. First, the blocks of the whole dataset are put in a random order,
    so that blocks of different files are next to each other. Then this order is divided into windows of
    ``window_rows`` rows, and the rows in each window are shuffled. A reader holds the rows of one window in memory. It
    reads the windows at the start and at the end of its part as a whole, and returns only its own rows of them.

    Attributes:
        make_reader: returns a reader of rows of the dataset, in the order of the dataset.
        blocks: the rows in each block.
        seed: the seed of the order.
        window_rows: the number of rows in a window.
        rows: the rows to read, numbered in the order of the epoch.
    """

    make_reader: Callable[[Sequence[Interval]], Reader]
    blocks: Sequence[Interval]
    seed: int
    window_rows: int
    rows: Sequence[Interval]

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`: shuffling copies the rows."""
        return True

    @property
    def converts(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return self.make_reader([self.blocks[0]]).converts

    def tables(
        self,
        columns: Sequence[str] | None = None,
        skip: int = 0,
        *,
        epoch: int = 0,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`: each table has rows of one window."""
        import numpy as np

        order = [
            self.blocks[index] for index in np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
        ]
        ends = list(itertools.accumulate(stop - start for start, stop in order))
        rows = select_rows(self.rows, [(skip, count_rows(self.rows))])
        pieces = (piece for interval in rows for piece in self._split_at_windows(interval))
        for window, own in itertools.groupby(pieces, key=lambda piece: piece[0] // self.window_rows):
            first = window * self.window_rows
            last = min(first + self.window_rows, ends[-1])
            begin, end = bisect_right(ends, first), bisect_right(ends, last - 1) + 1
            offset = ends[begin] - count_rows(order[begin : begin + 1])
            inside = select_rows(order[begin:end], [(first - offset, last - offset)])
            # The files are read in their own order, because the rows are shuffled anyway.
            reader = self.make_reader(sorted(inside))
            table = concatenate(reader.tables(columns, epoch=epoch, batch_rows=batch_rows))
            positions = np.random.default_rng([self.seed, epoch, window]).permutation(table.num_rows)
            yield table.take(np.concatenate([positions[start - first : stop - first] for start, stop in own]))

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`."""
        return self.make_reader([self.blocks[0]]).schema()

    def _split_at_windows(self, interval: Interval) -> Iterator[Interval]:
        start, stop = interval
        while start < stop:
            end = min(stop, (start // self.window_rows + 1) * self.window_rows)
            yield start, end
            start = end
