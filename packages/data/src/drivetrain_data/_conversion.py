"""Converts data in memory to tables: data frames, dicts of columns, and batches of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError
from drivetrain.plugin.backends import is_instance_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["check_names", "make_table", "table_of"]


def table_of(name: str, dataset: Any) -> pa.Table | None:
    """Convert a dataset in memory to a table; return None for any other dataset.

    Raises:
        ConfigurationError: the values of a column do not have one type, or two columns have the same name.
    """
    import pyarrow as pa

    if isinstance(dataset, pa.Table):
        return dataset
    if isinstance(dataset, pa.RecordBatch):
        return pa.Table.from_batches([dataset])
    if is_instance_of(dataset, "pandas", "DataFrame"):
        return _table_of_frame(name, dataset)
    if is_instance_of(dataset, "polars", "LazyFrame"):
        dataset = dataset.collect()
    if is_instance_of(dataset, "polars", "DataFrame"):
        for column, kind in dataset.schema.items():
            if str(kind) == "Object":
                raise _mixed(name, column, "polars stores them as Python objects")
        return dataset.to_arrow()
    if isinstance(dataset, Mapping):
        return make_table(name, dataset)
    return None


def make_table(name: str, columns: Mapping[Any, Any], types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Convert columns to a table.

    Args:
        name: the name of the dataset.
        columns: the columns by name: arrays, tensors or sequences.
        types: the known types of columns, if this is one of several tables of a dataset: the shapes of its tensors can
            differ from those in the other tables. None for a complete dataset.

    Raises:
        ConfigurationError: a column cannot be converted, or the columns have different lengths.
    """
    import pyarrow as pa

    arrays = {}
    for column, values in columns.items():
        try:
            arrays[str(column)] = _column_of(values, types, column)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _mixed(name, column, error) from error
    lengths = {column: len(values) for column, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(f"[DT-743] dataset {name!r}: expected columns of the same length, got {lengths}")
    return pa.table(arrays)


def check_names(name: str, columns: list[str]) -> None:
    """Check that the columns of a dataset have different names.

    Raises:
        ConfigurationError: two columns have the same name.
    """
    if equal := sorted({column for column in columns if columns.count(column) > 1}):
        raise ConfigurationError(
            f"[DT-743] dataset {name!r}: expected columns with different names, got several named "
            f"{', '.join(map(repr, equal))}. Rename or drop all but one"
        )


def _table_of_frame(name: str, frame: Any) -> pa.Table:
    import pyarrow as pa

    check_names(name, [str(column) for column in frame.columns])
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        for column in frame.columns:
            try:
                pa.Array.from_pandas(frame[column])
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as reason:
                raise _mixed(name, column, reason) from reason
        raise ConfigurationError(
            f"[DT-743] dataset {name!r}: expected a data frame that converts to Arrow, got an error: {error}"
        ) from error


def _mixed(name: str, column: Any, error: object) -> ConfigurationError:
    return ConfigurationError(
        f"[DT-743] dataset {name!r}: expected values of one type in column {column!r}, got values that do not convert "
        f"to a column: {error}. Convert the column to one type, or drop it"
    )


def _column_of(values: Any, types: Mapping[str, pa.DataType] | None, column: Any) -> Any:
    """Convert an array, tensor or sequence to a column. The rows of an array with several dimensions become tensors."""
    import numpy as np
    import pyarrow as pa

    kind = None if types is None else types.get(column)
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if kind is not None and not isinstance(kind, pa.BaseExtensionType):
        return pa.array(values, kind)
    if isinstance(values, np.ndarray) or hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim == 1 and not (array.dtype == object and _is_array(next(iter(array), None))):
            return pa.array(array)
        if array.ndim > 1 and types is None:
            return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
        values = list(array)
    first = next((value for value in values if value is not None), None)
    if kind is not None or _is_array(first):
        arrays = [None if value is None else np.asarray(value, getattr(kind, "value_type", None)) for value in values]
        dimensions = max((array.ndim for array in arrays if array is not None), default=2)
        if dimensions == 0:  # numbers, each stored as an array
            return pa.array([None if array is None else array[()] for array in arrays])
        if dimensions > 1 or types is not None:
            return _tensor_column(arrays)
    return pa.array(values)


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__array_interface__")


def _tensor_column(arrays: Any) -> Any:
    from drivetrain_data._tensors import tensor_column

    return tensor_column(arrays)
