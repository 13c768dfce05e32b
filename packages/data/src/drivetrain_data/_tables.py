"""Iterators of tables: cut into other sizes, shuffled, read ahead on a thread."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["prefetch", "rebatch", "shuffle", "skip_rows", "small_tables"]

T = TypeVar("T")
_SMALL_TABLE_BYTES = 2**22


class _Sliceable(Protocol):
    @property
    def num_rows(self) -> int: ...

    def slice(self, offset: int, rows: int, /) -> Any: ...


Sliced = TypeVar("Sliced", bound=_Sliceable)


def rebatch(
    tables: Iterator[Sliced],
    sizes: Iterable[int | None],
    join: Callable[[list[Sliced]], Sliced],
    *,
    drop_last: bool = False,
) -> Iterator[Sliced]:
    """Yields the same rows in tables of the given sizes, until tables or sizes end. The last table may be smaller.

    Args:
        tables: tables of any sizes.
        sizes: the numbers of rows; None for all remaining rows.
        join: makes one table of several.
        drop_last: leave out a last table that is smaller than its size.
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
    """Divides large tables, so that little is converted at a time.

    Args:
        tables: tables of any sizes.
        batch_size: tables are divided at multiples of it, so that few batches span two tables; None to leave them.
    """
    for table in tables:
        rows = table.num_rows or 1
        if batch_size is not None:
            rows = max(_SMALL_TABLE_BYTES * rows // max(table.nbytes, 1) // batch_size, 1) * batch_size
        for start in range(0, table.num_rows, rows):
            yield table.slice(start, rows)


def skip_rows(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yields tables without their first rows."""
    for table in tables:
        if table.num_rows > rows:
            yield table.slice(rows)
        rows = max(rows - table.num_rows, 0)


def shuffle(tables: Iterator[pa.Table], buffer_rows: int, seed: int | None) -> Iterator[pa.Table]:
    """Shuffles rows within a buffer.

    The buffer is filled to twice its size, shuffled, and emptied to its size, repeatedly. So each row is mixed with at
    least ``buffer_rows`` others, and moves twice on average. The order depends on the row's number and the seed alone,
    not on the sizes of the tables.

    Args:
        tables: tables of any sizes.
        buffer_rows: the size of the buffer.
        seed: the seed of the order; None for another order each time.
    """
    import numpy as np
    import pyarrow as pa

    generator = np.random.default_rng(seed)
    buffer: pa.Table | None = None
    for table in rebatch(tables, itertools.repeat(buffer_rows), pa.concat_tables):
        if buffer is None:
            buffer = table
            continue
        mixed = pa.concat_tables([buffer, table])
        mixed = mixed.take(generator.permutation(mixed.num_rows))
        yield mixed.slice(buffer_rows)
        buffer = mixed.slice(0, buffer_rows)
    if buffer is not None:
        yield buffer.take(generator.permutation(buffer.num_rows))


def prefetch(items: Iterator[T], batches: int, weight: Callable[[T], float] = lambda item: 1) -> Iterator[T]:
    """Iterates on a thread, ahead of the consumer. The thread ends when the consumer's iteration ends.

    Args:
        items: the items, such as batches or tables; only the thread takes them.
        batches: the thread waits while this many batches are ready; 0 to use no thread.
        weight: the number of batches that an item counts for.
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
        except BaseException as raised:  # raised again in the consumer
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
