"""Values of a training state as JSON. An array or a tensor becomes a mapping with its type, its shape and its bytes."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import CheckpointError

__all__ = ["from_json", "to_json"]

_ARRAY = "__array__"
_NUMERIC = "biufc"


def to_json(value: Any, name: str) -> Any:
    """Convert a value to one that JSON can represent, and that :func:`from_json` converts back.

    Args:
        value: made of numbers, strings, booleans, None, mappings with strings as keys, lists, and arrays and tensors
            of numbers. Tuples become lists.
        name: the name of the value, for the error message.

    Raises:
        CheckpointError: a part of the value is something else. The message names it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping) and all(type(key) is str for key in value) and _ARRAY not in value:
        return {key: to_json(inner, f"{name}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(inner, f"{name}[{index}]") for index, inner in enumerate(value)]
    array = _as_array(value)
    if array is None:
        raise CheckpointError(
            "[DT-813] the training state cannot be restored: expected numbers, strings, arrays, and lists and mappings "
            f"of them, got {value!r:.100} of type {type(value).__qualname__} in {name}. Change the state_dict() that "
            "returns this entry"
        )
    data = base64.b64encode(array.tobytes()).decode()
    return {_ARRAY: [array.dtype.str, list(array.shape), data]}


def from_json(value: Any) -> Any:
    """Convert a value back that :func:`to_json` has returned. Arrays and tensors become arrays of NumPy.

    Args:
        value: the value, which may come from an untrusted source.

    Raises:
        ValueError: an array is damaged.
    """
    if isinstance(value, list):
        return [from_json(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return _read_array(value[_ARRAY]) if _ARRAY in value else {key: from_json(inner) for key, inner in value.items()}


def _as_array(value: object) -> Any:
    """Return an array or a tensor of numbers, on the CPU, as an array of NumPy; None for other values."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(value, "__array__"):
        return None
    array = numpy.asarray(value)
    return array if array.dtype.kind in _NUMERIC else None


def _read_array(entry: Any) -> Any:
    import numpy as np

    try:
        dtype_name, shape, data = entry
        dtype = np.dtype(dtype_name)
        content = base64.b64decode(data, validate=True)
    except TypeError as error:
        raise ValueError(f"an array is damaged: {error}") from None
    if dtype.kind not in _NUMERIC or len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array is damaged: its bytes do not match its type and shape")
    return np.frombuffer(content, dtype).reshape(shape).copy()
