"""Rows as numpy arrays, one per column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["Columns", "is_array", "to_numpy"]


class Columns:
    """Rows with one numpy array per numeric column, so that batches are slices of the arrays.

    Columns of other types stay Arrow columns until they are cut into batches, because their array type depends on the
    values in the batch.

    Args:
        columns: by name, arrays or ``pyarrow.ChunkedArray``, all of the same length.
        num_rows: the length of the columns.
    """

    __slots__ = ("columns", "num_rows")

    def __init__(self, columns: Mapping[str, Any], num_rows: int) -> None:
        self.columns = columns
        self.num_rows = num_rows

    @classmethod
    def of(cls, table: pa.Table, *, writable: bool = False, fresh: bool = False) -> Columns:
        """Return the columns of a table.

        Args:
            table: the rows.
            writable: return writable arrays. This copies the table unless it is fresh.
            fresh: nothing else refers to the table's memory.
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
        """Return some of the rows without copying them."""
        end = offset + rows
        return Columns({name: column[offset:end] for name, column in self.columns.items()}, rows)

    @staticmethod
    def join(parts: list[Columns]) -> Columns:
        """Concatenate the rows of several parts."""
        import numpy as np
        import pyarrow as pa

        joined: dict[str, Any] = {}
        for name in parts[0].columns:
            columns = [part.columns[name] for part in parts]
            if any(isinstance(column, np.ndarray) for column in columns):  # some tables may have nulls in this column
                joined[name] = np.concatenate([_array_of(column) for column in columns])
            else:
                joined[name] = pa.chunked_array([chunk for column in columns for chunk in column.chunks])
        return Columns(joined, sum(part.num_rows for part in parts))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns as arrays of shape ``(rows, ...)``."""
        return {name: _array_of(column) for name, column in self.columns.items()}


def is_array(kind: pa.DataType) -> bool:
    """Return True if columns of this type without nulls convert to arrays of numbers."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a column as an array; lists of equal length, and tensors, become additional dimensions."""
    import pyarrow as pa

    kind = column.type
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # there is no chunk, or the type does not support combine_chunks()
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


def _view(column: pa.ChunkedArray) -> np.ndarray[Any, Any] | None:
    """Return a writable view of a column's memory; None if there is no such view."""
    import numpy as np
    import pyarrow as pa

    if column.num_chunks != 1 or isinstance(column.type, pa.FixedShapeTensorType):
        return None
    (chunk,) = column.chunks
    memory = chunk.buffers()[1]
    if not memory.is_mutable:  # for example, the memory of a mapped file
        return None
    kind = np.dtype(column.type.to_pandas_dtype())
    view: np.ndarray[Any, Any] = np.frombuffer(memory, kind, len(chunk), chunk.offset * kind.itemsize)
    return view


def _copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array to Arrow's memory pool, which reuses freed memory; new pages from the kernel take longer."""
    import numpy as np
    import pyarrow as pa

    memory = pa.allocate_buffer(array.nbytes)
    copied: np.ndarray[Any, Any] = np.frombuffer(memory, array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _array_of(column: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    return column if isinstance(column, np.ndarray) else to_numpy(column)
