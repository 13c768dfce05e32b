"""Converts Arrow tables to the arrays and data frames that the libraries accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import types

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["has_categories", "is_text", "numbers", "plain_numbers", "sizes", "starts", "to_frame"]


def numbers(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a column as an array of numbers, with NaN for missing values. Decimals become 64-bit floats."""
    kind = column.type
    if not types.is_floating(kind) and (column.null_count or not types.is_integer(kind)):
        column = column.cast(pa.float64(), safe=False)
    values: np.ndarray[Any, Any] = column.to_numpy()
    return values


def plain_numbers(table: pa.Table) -> pa.Table:
    """Return the same columns, but with floats of 32 or 64 bits instead of decimals and floats of 16 bits."""
    schema = table.schema
    for number, field in enumerate(schema):
        if types.is_decimal(field.type):
            schema = schema.set(number, field.with_type(pa.float64()))
        elif types.is_float16(field.type):
            schema = schema.set(number, field.with_type(pa.float32()))
    return table if schema is table.schema else table.cast(schema)


def has_categories(schema: pa.Schema) -> bool:
    """Return True if a column is categorical."""
    return any(types.is_dictionary(field.type) for field in schema)


def is_text(kind: pa.DataType) -> bool:
    """Return True if the values of a type are strings."""
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Convert a table to a data frame whose dtypes depend only on the schema, and not on missing values."""
    import pandas as pd

    nullable = {
        pa.bool_(): pd.BooleanDtype(),
        **{getattr(pa, f"int{bits}")(): getattr(pd, f"Int{bits}Dtype")() for bits in (8, 16, 32, 64)},
        **{getattr(pa, f"uint{bits}")(): getattr(pd, f"UInt{bits}Dtype")() for bits in (8, 16, 32, 64)},
    }
    return table.to_pandas(types_mapper=nullable.get, ignore_metadata=True)


def starts(groups: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return the index of the first row of each group; the rows of a group are contiguous."""
    values = groups.to_numpy()
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([[0], changes]) if len(values) else changes


def sizes(groups: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return the number of rows of each group; the rows of a group are contiguous."""
    return np.diff(np.concatenate([starts(groups), [len(groups)]]))
