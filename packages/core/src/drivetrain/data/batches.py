"""Tables in, batches out: cut to size, shuffled, converted, made ahead of time."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = [
    "Batches",
    "batch_sizes",
    "cut",
    "prefetched",
    "shuffled",
    "to_format",
    "to_numpy",
    "to_tensors",
    "to_tf_tensors",
    "without",
]

T = TypeVar("T")


class Batches(Generic[T]):
    """An iterable that starts anew each time, as a data loader does.

    Args:
        make: begins an iteration.
    """

    def __init__(self, make: Callable[[], Iterator[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return self._make()


def batch_sizes(rows: int, most: int, batch_size: int | None, *, drop_last: bool, least: int) -> Iterator[int]:
    """The sizes of a shard's batches, as many on every rank: collective operations count on it.

    Shards differ by one row at most. Where that one row would be another batch, the ranks without it split their last
    full batch instead; batches of one row cannot be split.

    Args:
        rows: of this shard.
        most: of the greatest shard.
        batch_size: rows of a batch; None for all in one.
        drop_last: leave out what does not fill a batch.
        least: rows of the smallest shard.
    """
    if batch_size is None:
        return iter([rows] if rows else [])
    if drop_last:
        return itertools.repeat(batch_size, least // batch_size)
    full, rest = divmod(rows, batch_size)
    sizes = [batch_size] * full + [rest] * bool(rest)
    if sizes and len(sizes) < -(-most // batch_size) and sizes[-1] > 1:
        sizes[-1:] = [sizes[-1] - 1, 1]
    return iter(sizes)


def cut(tables: Iterator[pa.Table], sizes: Iterable[int], *, drop_last: bool = False) -> Iterator[pa.Table]:
    """Tables of the sizes asked for, until one of both ends; the last may be smaller.

    Args:
        tables: of any sizes.
        sizes: in rows.
        drop_last: leave out a last one that is smaller.
    """
    import pyarrow as pa

    waiting: collections.deque[pa.Table] = collections.deque()
    for size in sizes:
        parts, missing = [], size
        while missing:
            if not waiting:
                following = next(tables, None)
                if following is None:
                    break
                if following.num_rows:
                    waiting.append(following)
                continue
            first = waiting.popleft()
            parts.append(first.slice(0, missing))
            if first.num_rows > missing:
                waiting.appendleft(first.slice(missing))
            missing -= parts[-1].num_rows
        if not parts or (missing and drop_last):
            return
        yield parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        if missing:
            return


def shuffled(tables: Iterator[pa.Table], rows: int, seed: int | None) -> Iterator[pa.Table]:
    """Mixes the order of rows within a buffer.

    The buffer is filled to twice its rows, mixed, emptied to its rows, and so on: each row is mixed with at least so
    many others, and moved twice on average. Which row comes when depends on their number and the seed alone, not on the
    tables that they come in.

    Args:
        tables: of any sizes.
        rows: of the buffer.
        seed: of the order; None for another one each time.
    """
    import numpy as np
    import pyarrow as pa

    generator = np.random.default_rng(seed)
    buffer: pa.Table | None = None
    for table in cut(tables, itertools.repeat(rows)):
        if buffer is None:
            buffer = table
            continue
        mixed = pa.concat_tables([buffer, table])
        mixed = mixed.take(generator.permutation(mixed.num_rows))
        yield mixed.slice(rows)
        buffer = mixed.slice(0, rows)
    if buffer is not None:
        yield buffer.take(generator.permutation(buffer.num_rows))


def without(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Tables without their first rows."""
    for table in tables:
        if table.num_rows > rows:
            yield table.slice(rows)
        rows = max(rows - table.num_rows, 0)


def to_format(table: pa.Table, batch_format: str | None) -> Any:
    """A batch as users want it: ``"numpy"`` (a dict of arrays), ``"pandas"`` or ``"pyarrow"``."""
    if batch_format == "pyarrow":
        return table
    if batch_format == "pandas":
        return table.to_pandas()
    return {name: to_numpy(table.column(name)) for name in table.column_names}


def to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as an array; rows that are lists of one length, or tensors, become further dimensions."""
    import pyarrow as pa

    kind = column.type
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunk, or of more than one, which some types stay
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: np.ndarray[Any, Any] = array.to_numpy_ndarray()
        return tensors
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and len(array) and not array.null_count:
        lengths = array.value_lengths().unique()
        if len(lengths) == 1:
            values = to_numpy(pa.chunked_array([array.flatten()]))
            return values.reshape(len(array), lengths[0].as_py(), *values.shape[1:])
    plain: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return plain


def to_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any, device: Any) -> dict[str, Any]:
    """A batch of arrays as tensors on a device.

    Args:
        batch: arrays by name.
        dtypes: a torch dtype for all, or one by name; None for those of the arrays.
        device: where they are to be.
    """
    import torch

    tensors = {}
    for name, array in batch.items():
        if array.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"iter_torch_batches() wants columns of numbers, found column {name!r} of type {array.dtype}: "
                "make tensors of it in a collate_fn, or leave it out of the dataset"
            )
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        tensors[name] = tensor.to(device=device, dtype=dtype, non_blocking=True)
    return tensors


def to_tf_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any) -> dict[str, Any]:
    """A batch of arrays as tensors of TensorFlow.

    Args:
        batch: arrays by name.
        dtypes: a TensorFlow dtype for all, or one by name; None for those of the arrays.
    """
    import tensorflow as tf

    tensors = {}
    for name, array in batch.items():
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        try:
            tensors[name] = tf.cast(array, dtype) if dtype is not None else tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"tensors are wanted, and the rows of column {name!r} cannot be one: {error}: leave it out of the "
                "dataset, or make tensors of iter_batches() yourself"
            ) from error
    return tensors


def prefetched(make: Callable[[], Iterator[T]], count: int) -> Iterator[T]:
    """Makes items on a thread, so many ahead of who takes them; the thread ends with the iteration, however it ends."""
    if not count:
        yield from make()
        return
    room = threading.Semaphore(count)
    made = threading.Semaphore(0)
    items: collections.deque[tuple[T] | BaseException | None] = collections.deque()
    over = False

    def work() -> None:
        ending: BaseException | None = None
        source = make()
        try:
            while True:
                room.acquire()
                if over:
                    return
                item = next(source, _END)
                if item is _END:
                    break
                items.append((item,))
                made.release()
        except BaseException as error:  # whatever reading raises is raised where the items are taken
            ending = error
        items.append(ending)
        made.release()

    thread = threading.Thread(target=work, name="drivetrain batches", daemon=True)
    thread.start()
    try:
        while True:
            made.acquire()
            taken = items.popleft()
            if isinstance(taken, BaseException):
                raise taken
            if taken is None:
                return
            room.release()
            yield taken[0]
    finally:
        over = True
        room.release()


_END: Any = object()
