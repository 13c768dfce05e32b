"""A column of arrays with any number of dimensions, whose shapes may differ from row to row: images, for example.

This module imports pyarrow, so other modules import it only in functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["TensorType", "tensor_column", "tensors_of"]


class TensorScalar(pa.ExtensionScalar):  # type: ignore[misc]
    """A row of a column of arrays."""

    def as_py(self, **options: Any) -> np.ndarray[Any, Any] | None:
        """Return the array; None for a missing value."""
        stored = self.value.as_py(**options) if self.is_valid else None
        if stored is None:
            return None
        dtype = self.type.storage_type.field("values").type.value_type.to_pandas_dtype()
        array: np.ndarray[Any, Any] = np.array(stored["values"], dtype).reshape(stored["shape"])
        return array


class TensorType(pa.ExtensionType):  # type: ignore[misc]
    """The type of a column of arrays. A row stores its shape, and its values in C order.

    Args:
        value_type: the type of the values.
    """

    def __init__(self, value_type: pa.DataType) -> None:
        storage = pa.struct([("shape", pa.list_(pa.int64())), ("values", pa.large_list(value_type))])
        super().__init__(storage, "drivetrain.tensor")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    def __arrow_ext_scalar_class__(self) -> type[TensorScalar]:
        return TensorScalar

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> TensorType:
        return cls(storage_type.field("values").type.value_type)


def tensor_column(rows: Sequence[Any]) -> pa.ExtensionArray:
    """Return a column of arrays.

    Args:
        rows: an array, or an object that numpy can convert to an array, for each row; None for a missing value.

    Raises:
        TypeError: the values are neither numbers nor booleans.
    """
    arrays = [None if row is None else np.asarray(row) for row in rows]
    kinds = {array.dtype for array in arrays if array is not None}
    dtype = np.result_type(*kinds) if kinds else np.dtype("float64")
    if dtype.kind not in "biuf":
        raise TypeError(f"expected arrays of numbers, got arrays of {dtype}")
    filled = [np.empty(0, dtype) if array is None else array for array in arrays]
    values = np.concatenate([np.empty(0, dtype), *(array.ravel() for array in filled)]).astype(dtype, copy=False)
    offsets = np.cumsum([0, *(array.size for array in filled)])
    kind = TensorType(pa.from_numpy_dtype(dtype))
    storage = pa.StructArray.from_arrays(
        [
            pa.array([list(array.shape) for array in filled], pa.list_(pa.int64())),
            pa.LargeListArray.from_arrays(
                pa.array(offsets, pa.int64()), pa.array(values, kind.storage_type[1].type.value_type)
            ),
        ],
        fields=list(kind.storage_type),
        mask=pa.array([array is None for array in arrays], pa.bool_()),
    )
    return pa.ExtensionArray.from_storage(kind, storage)


def tensors_of(column: pa.ExtensionArray) -> np.ndarray[Any, Any]:
    """Return the rows as one array, or as an array of objects if some are missing or if their shapes differ."""
    storage = column.storage
    shapes = storage.field("shape").to_pylist()
    lists = storage.field("values")
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy(zero_copy_only=False)
    if not storage.null_count and len({tuple(shape) for shape in shapes}) == 1:
        stacked: np.ndarray[Any, Any] = values[offsets[0] : offsets[-1]].reshape(len(shapes), *shapes[0])
        return stacked
    rows = np.empty(len(shapes), object)
    for number, valid in enumerate(storage.is_valid().to_pylist()):
        if valid:
            rows[number] = values[offsets[number] : offsets[number + 1]].reshape(shapes[number])
    return rows
