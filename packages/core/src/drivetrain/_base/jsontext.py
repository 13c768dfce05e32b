"""Encodes values as JSON, by the package ``orjson`` if it is installed: ten times as fast as by Python's json.

Both texts are ASCII, and stand for equal values, also for NaN and infinite numbers: Python's json encodes the values
that orjson would change or refuse.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

__all__ = ["comma_separated", "json_bytes"]

_encode = json.JSONEncoder(separators=(",", ":")).encode


@functools.cache
def _fast() -> Callable[[Any], bytes] | None:
    try:
        orjson = importlib.import_module("orjson")
        return partial(orjson.dumps, option=orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME)
    except ImportError:  # it is not installed, or damaged
        return None


def json_bytes(value: Any) -> bytes:
    """Return a plain value as one line of JSON.

    Args:
        value: a number, text, boolean, None, or a list or mapping with texts as keys of them.

    Raises:
        ValueError: an integer has more digits than Python converts to text.
        TypeError: the value is not plain.
    """
    fast = _fast()
    if fast is not None:
        try:
            text = fast(value)
        except TypeError:  # such as a large integer
            return _encode(value).encode()
        if b"null" not in text and text.isascii():  # null may be a number that is not finite
            return text
    return _encode(value).encode()


def comma_separated(numbers: Sequence[float]) -> bytes:
    """Return numbers as text, separated by commas. Numbers that are not finite are ``nan`` and ``inf``.

    Raises:
        ValueError: an integer has more digits than Python converts to text.
    """
    fast = _fast()
    if fast is not None:
        try:
            text = fast(numbers)
        except TypeError:  # an integer of more than 64 bits
            text = b"null"
        if b"null" not in text:  # which stands for a number that is not finite
            return text[1:-1]
    return ",".join(map(repr, numbers)).encode()
