"""Functions on iterators of tables: they change the sizes of the tables, shuffle rows, and prefetch on a thread."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["concatenate", "prefetch", "rebatch", "shuffle", "skip_rows", "small_tables"]

T = TypeVar("T")
_SMALL_TABLE_BYTES = 2**22


class _Sliceable(Protocol):
    @property
    def num_rows(self) -> int: ...

    def slice(self, offset: int, rows: int, /) -> Any: ...


Sliced = TypeVar("Sliced", bound=_Sliceable)


def concatenate(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of all tables. The types of their columns are widened: a column can have only nulls in one."""
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive")


def rebatch(
    tables: Iterator[Sliced],
    sizes: Iterable[int | None],
    join: Callable[[list[Sliced]], Sliced],
    *,
    drop_last: bool = False,
) -> Iterator[Sliced]:
    """Yield the same rows in tables of the given sizes, until the tables or the sizes end.

    The last table is smaller than its size if too few rows remain.

    Args:
        tables: tables of any sizes.
        sizes: the number of rows of each table to yield; None for a table with all remaining rows.
        join: concatenates tables.
        drop_last: drop the last table if it is smaller than its size.
    """
    table, offset = None, 0
    for size in sizes:
        slices, missing = [], size
        while missing is None or missing > 0:
            if table is None or offset == table.num_rows:
                table, offset = next(tables, None), 0
                if table is None:
                    break
                continue
            rows = table.num_rows - offset
            if missing is not None:
                rows = min(missing, rows)
                missing -= rows
            slices.append(table.slice(offset, rows))
            offset += rows
        if not slices or (missing and drop_last):
            return
        yield slices[0] if len(slices) == 1 else join(slices)
        if missing != 0:
            return


def small_tables(tables: Iterator[pa.Table], batch_size: int | None) -> Iterator[pa.Table]:
    """Divide large tables, so that each conversion processes only a small part.

    Args:
        tables: tables of any sizes.
        batch_size: the number of rows in a batch. Tables are divided at multiples of this number, so that few batches
            span two tables. None to keep the tables unchanged.
    """
    for table in tables:
        rows = table.num_rows or 1
        if batch_size is not None:
            rows = max(_SMALL_TABLE_BYTES * rows // max(table.nbytes, 1) // batch_size, 1) * batch_size
        for start in range(0, table.num_rows, rows):
            yield table.slice(start, rows)


def skip_rows(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Skip the first ``rows`` rows, which may span several tables, and yield all later rows."""
    for table in tables:
        if table.num_rows > rows:
            yield table.slice(rows)
        rows = max(rows - table.num_rows, 0)


def shuffle(tables: Iterator[pa.Table], buffer_rows: int, seed: int | None) -> Iterator[pa.Table]:
    """Shuffle rows within a buffer.

    The buffer is repeatedly filled to ``2 * buffer_rows`` rows and shuffled, and then half of its rows are yielded. So
    each row is shuffled with at least ``buffer_rows`` others, and is copied twice on average. The new order of the row
    numbers depends only on the number of rows, ``buffer_rows`` and ``seed``, not on the sizes of the tables.

    Args:
        tables: tables of any sizes.
        buffer_rows: the size of the buffer in rows.
        seed: the seed of the order; None for a different order each time.
    """
    import numpy as np
    import pyarrow as pa

    generator = np.random.default_rng(seed)
    buffer: pa.Table | None = None
    for table in rebatch(tables, itertools.repeat(buffer_rows), concatenate):
        if buffer is None:
            buffer = table
            continue
        shuffled = pa.concat_tables([buffer, table])
        shuffled = shuffled.take(generator.permutation(shuffled.num_rows))
        yield shuffled.slice(buffer_rows)
        buffer = shuffled.slice(0, buffer_rows)
    if buffer is not None:
        yield buffer.take(generator.permutation(buffer.num_rows))


def prefetch(items: Iterator[T], batches: int, weight: Callable[[T], float] = lambda item: 1) -> Iterator[T]:
    """Yield items that a thread creates ahead. The thread ends when the consumer stops iterating.

    Args:
        items: the items, such as batches or tables; only the thread iterates over them.
        batches: the thread waits while at least this number of batches is ready; 0 to use no thread.
        weight: returns the number of batches to which an item corresponds.
    """
    if not batches:
        yield from items
        return
    changed = threading.Condition()
    queue: collections.deque[tuple[T] | BaseException | None] = collections.deque()
    ready = 0.0
    closed = False

    def has_room() -> bool:
        return closed or ready < batches

    def produce() -> None:
        nonlocal ready
        error: BaseException | None = None
        try:
            while True:
                with changed:
                    changed.wait_for(has_room)
                if closed:
                    return
                item = next(items, _END)
                if item is _END:
                    break
                with changed:
                    queue.append((item,))
                    ready += weight(item)
                    changed.notify()
                del item
        except BaseException as raised:  # raised again in the consumer's thread
            error = raised
        with changed:
            queue.append(error)
            changed.notify()

    threading.Thread(target=produce, name="drivetrain batches", daemon=True).start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: queue)
                entry = queue.popleft()
                if isinstance(entry, tuple):
                    ready -= weight(entry[0])
                changed.notify()
            if isinstance(entry, BaseException):
                raise entry
            if entry is None:
                return
            yield entry[0]
    finally:
        with changed:
            closed = True
            changed.notify()


_END: Any = object()
