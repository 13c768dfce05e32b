"""Stores rows as numpy arrays, one per column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["Columns", "is_array", "to_frame", "to_numpy"]


class Columns:
    """Rows that are stored as one numpy array per numeric column, so that a batch is a slice of each array.

    Columns of other types, and columns with nulls, are stored as Arrow columns. They are converted batch by batch,
    because the type of the resulting array depends on the values in the batch.

    Args:
        columns: a mapping from a column's name to a numpy array or a ``pyarrow.ChunkedArray``.
        num_rows: the length of every column.
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
            writable: True to return writable arrays. A read-only array is copied, unless ``fresh`` is True and its
                memory can be written.
            fresh: True if nothing else refers to the table's memory.
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
        """Return ``rows`` rows, starting with the row number ``offset``, without copying them."""
        end = offset + rows
        return Columns({name: column[offset:end] for name, column in self.columns.items()}, rows)

    @staticmethod
    def join(parts: list[Columns]) -> Columns:
        """Concatenate the rows of several objects that have the same column names."""
        import numpy as np
        import pyarrow as pa

        joined: dict[str, Any] = {}
        for name in parts[0].columns:
            columns = [part.columns[name] for part in parts]
            # A numeric column is an Arrow column in the parts where it has nulls, and an array in the other parts.
            # A reader that converts rows can return columns of different types.
            if any(isinstance(column, np.ndarray) for column in columns) or any(
                column.type != columns[0].type for column in columns
            ):
                joined[name] = _concatenate([_array_of(column) for column in columns])
            else:
                joined[name] = pa.chunked_array([chunk for column in columns for chunk in column.chunks])
        return Columns(joined, sum(part.num_rows for part in parts))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns as arrays of shape ``(rows, ...)``."""
        return {name: _array_of(column) for name, column in self.columns.items()}


def is_array(kind: pa.DataType) -> bool:
    """Return True if a column of this type, provided that it has no nulls, converts to a numeric or boolean array."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a column as an array. Tensors, and lists that all have the same length, become additional dimensions."""
    import pyarrow as pa

    kind = column.type
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no chunk, or a type without combine_chunks()
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: np.ndarray[Any, Any] = array.to_numpy_ndarray()
        return tensors
    if _is_ragged(kind):
        from drivetrain_data._tensors import tensors_of

        return tensors_of(array)
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


def _is_ragged(kind: pa.DataType) -> bool:
    """Return True for a ``TensorType`` of ours, without importing its module."""
    import pyarrow as pa

    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "drivetrain.tensor"


def to_frame(table: pa.Table) -> Any:
    """Return a table as a pandas data frame. Tensors become columns of arrays."""
    import pyarrow as pa

    tensors = [
        field.name
        for field in table.schema
        if _is_ragged(field.type) or isinstance(field.type, pa.FixedShapeTensorType)
    ]
    frame = table.drop_columns(tensors).to_pandas() if tensors else table.to_pandas()
    for name in tensors:
        frame.insert(table.column_names.index(name), name, list(to_numpy(table[name])))
    return frame


def _concatenate(arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Concatenate arrays along the first dimension. If their other dimensions differ, return an array of objects."""
    import numpy as np

    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    rows = [row for array in arrays for row in array]
    joined = np.empty(len(rows), object)
    joined[:] = rows
    return joined


def _view(column: pa.ChunkedArray) -> np.ndarray[Any, Any] | None:
    """Return a writable array that shares the memory of a column; None if this is impossible."""
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
    """Copy an array into Arrow's memory pool, which reuses freed memory and so is faster than new pages."""
    import numpy as np
    import pyarrow as pa

    memory = pa.allocate_buffer(array.nbytes)
    copied: np.ndarray[Any, Any] = np.frombuffer(memory, array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _array_of(column: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    return column if isinstance(column, np.ndarray) else to_numpy(column)
