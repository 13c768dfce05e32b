"""Rows as numpy arrays, one per column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["Columns", "is_array", "to_numpy"]


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
