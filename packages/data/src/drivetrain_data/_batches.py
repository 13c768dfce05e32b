"""Tables in, batches out: sliced to size, shuffled, converted, prepared ahead of time."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from drivetrain import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = [
    "Batches",
    "Columns",
    "batch_sizes",
    "is_array",
    "pieces",
    "prefetched",
    "rebatch",
    "shuffled",
    "to_numpy",
    "to_tensors",
    "to_tf_tensors",
    "without",
]

T = TypeVar("T")
_PIECE_BYTES = 2**22


class _Sliceable(Protocol):
    @property
    def num_rows(self) -> int: ...

    def slice(self, offset: int, rows: int, /) -> Any: ...


Sliced = TypeVar("Sliced", bound=_Sliceable)


class Batches(Generic[T]):
    """An iterable that starts anew each time, as a data loader does.

    Args:
        make: begins an iteration.
    """

    def __init__(self, make: Callable[[], Iterator[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return self._make()


def batch_sizes(
    rows: int, largest_shard: int, batch_size: int | None, *, drop_last: bool, smallest_shard: int
) -> Iterator[int]:
    """The sizes of a shard's batches, as many on every rank: collective operations count on it.

    Shards differ by one row at most. Where that one row would be another batch, the ranks without it split their last
    full batch instead; batches of one row cannot be split.

    Args:
        rows: of this shard.
        largest_shard: rows of the largest shard.
        batch_size: rows of a batch; None for all in one.
        drop_last: leave out what does not fill a batch.
        smallest_shard: rows of the smallest shard.
    """
    if batch_size is None:
        return iter([rows] if rows else [])
    if drop_last:
        return itertools.repeat(batch_size, smallest_shard // batch_size)
    full, rest = divmod(rows, batch_size)
    sizes = [batch_size] * full + [rest] * bool(rest)
    if sizes and len(sizes) < -(-largest_shard // batch_size) and sizes[-1] > 1:
        sizes[-1:] = [sizes[-1] - 1, 1]
    return iter(sizes)


def rebatch(
    tables: Iterator[Sliced],
    sizes: Iterable[int | None],
    join: Callable[[list[Sliced]], Sliced],
    *,
    drop_last: bool = False,
) -> Iterator[Sliced]:
    """The same rows in tables of the given sizes, until tables or sizes end; the last table may be smaller.

    Args:
        tables: of any sizes.
        sizes: in rows; None for all that are left.
        join: makes one table of several.
        drop_last: leave out a last table that is smaller than its size.
    """
    table, offset = None, 0
    for size in sizes:
        parts, missing = [], size
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
            parts.append(table.slice(offset, rows))
            offset += rows
        if not parts or (missing and drop_last):
            return
        yield parts[0] if len(parts) == 1 else join(parts)
        if missing != 0:
            return


class Columns:
    """Rows with a numpy array for each column that is one by its type alone, so that batches are slices of it.

    What a column of another type becomes depends on the values in the batch, and is left to it.

    Args:
        columns: by name, arrays or ``pyarrow.ChunkedArray``, all of one length.
        num_rows: that length.
    """

    __slots__ = ("columns", "num_rows")

    def __init__(self, columns: Mapping[str, Any], num_rows: int) -> None:
        self.columns = columns
        self.num_rows = num_rows

    @classmethod
    def of(cls, table: pa.Table, *, writable: bool = False, fresh: bool = False) -> Columns:
        """A table's columns.

        Args:
            table: the rows.
            writable: the arrays may be written to, which takes a copy of a table that is not fresh.
            fresh: nobody else has the table's memory.
        """
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for name, column in columns.items():
            if is_array(column.type) and not column.null_count:
                array = to_numpy(column)
                if writable and not array.flags.writeable:
                    view = _view(column) if fresh else None
                    array = _copy(array) if view is None else view
                columns[name] = array
        return cls(columns, table.num_rows)

    def slice(self, offset: int, rows: int) -> Columns:
        """Some of the rows, without a copy."""
        end = offset + rows
        return Columns({name: column[offset:end] for name, column in self.columns.items()}, rows)

    @staticmethod
    def join(parts: list[Columns]) -> Columns:
        """The rows of several."""
        import numpy as np
        import pyarrow as pa

        joined: dict[str, Any] = {}
        for name in parts[0].columns:
            columns = [part.columns[name] for part in parts]
            if any(isinstance(column, np.ndarray) for column in columns):  # a null makes a table's column no array
                joined[name] = np.concatenate([_array_of(column) for column in columns])
            else:
                joined[name] = pa.chunked_array([chunk for column in columns for chunk in column.chunks])
        return Columns(joined, sum(part.num_rows for part in parts))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns, each as an array of shape ``(rows, ...)``."""
        return {name: _array_of(column) for name, column in self.columns.items()}


def is_array(kind: pa.DataType) -> bool:
    """Whether columns of a type are arrays of numbers, but for nulls."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _view(column: pa.ChunkedArray) -> np.ndarray[Any, Any] | None:
    """A column's own memory, to be written to; None where that cannot be."""
    import numpy as np
    import pyarrow as pa

    if column.num_chunks != 1 or isinstance(column.type, pa.FixedShapeTensorType):
        return None
    (chunk,) = column.chunks
    memory = chunk.buffers()[1]
    if not memory.is_mutable:  # that of a file that is mapped, say
        return None
    kind = np.dtype(column.type.to_pandas_dtype())
    view: np.ndarray[Any, Any] = np.frombuffer(memory, kind, len(chunk), chunk.offset * kind.itemsize)
    return view


def _copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy in memory of Arrow's, which keeps what is freed: the kernel takes longer to give new pages than this."""
    import numpy as np
    import pyarrow as pa

    memory = pa.allocate_buffer(array.nbytes)
    copied: np.ndarray[Any, Any] = np.frombuffer(memory, array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _array_of(column: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    return column if isinstance(column, np.ndarray) else to_numpy(column)


def pieces(tables: Iterator[pa.Table], batch_size: int | None) -> Iterator[pa.Table]:
    """Tables of at least a batch, but small, so that little at a time is converted; cut where batches may be."""
    for table in tables:
        rows = table.num_rows or 1
        if batch_size is not None:
            rows = max(_PIECE_BYTES * rows // max(table.nbytes, 1) // batch_size, 1) * batch_size
        for start in range(0, table.num_rows, rows):
            yield table.slice(start, rows)


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
    for table in rebatch(tables, itertools.repeat(rows), pa.concat_tables):
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

    stays = device is None or torch.device(device).type == "cpu"
    tensors = {}
    for name, array in batch.items():
        if array.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"iter_torch_batches() wants columns of numbers, found column {name!r} of type {array.dtype}: "
                "make tensors of it in a collate_fn, or leave it out of the dataset"
            )
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if dtype is not None or not stays:
            tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        tensors[name] = tensor
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


def prefetched(
    make: Callable[[], Iterator[T]], count: int, weigh: Callable[[T], float] = lambda item: 1
) -> Iterator[T]:
    """Makes items on a thread, ahead of who takes them; the thread ends with the iteration, however it ends.

    Args:
        make: begins to make them.
        count: how many batches may wait to be taken before another item is made.
        weigh: how many batches an item is.
    """
    if not count:
        yield from make()
        return
    changed = threading.Condition()
    items: collections.deque[tuple[T] | BaseException | None] = collections.deque()
    ahead = 0.0
    over = False

    def has_room() -> bool:
        return over or ahead < count

    def work() -> None:
        nonlocal ahead
        ending: BaseException | None = None
        source = make()
        try:
            while True:
                with changed:
                    changed.wait_for(has_room)
                if over:
                    return
                item = next(source, _END)
                if item is _END:
                    break
                with changed:
                    items.append((item,))
                    ahead += weigh(item)
                    changed.notify()
                del item
        except BaseException as error:  # whatever reading raises is raised where the items are taken
            ending = error
        with changed:
            items.append(ending)
            changed.notify()

    thread = threading.Thread(target=work, name="drivetrain batches", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: items)
                taken = items.popleft()
                if isinstance(taken, tuple):
                    ahead -= weigh(taken[0])
                changed.notify()
            if isinstance(taken, BaseException):
                raise taken
            if taken is None:
                return
            yield taken[0]
    finally:
        with changed:
            over = True
            changed.notify()


_END: Any = object()
