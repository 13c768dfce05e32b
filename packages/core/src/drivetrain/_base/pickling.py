"""How what workers run and are given is pickled."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["dumps"]


def dumps(value: Any, reduce: Callable[[Any], Any] | None = None) -> bytes:
    """Pickles functions and classes of scripts too, by value, so that ``pickle.loads`` can load them elsewhere.

    Args:
        value: what to pickle.
        reduce: says how an object is pickled, as ``__reduce__`` does, or returns ``NotImplemented``.
    """
    data = io.BytesIO()
    _Pickler(data, reduce).dump(value)
    return data.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also pickles modules of a class of their own, as ``torch.backends.cudnn`` is, which go by name."""

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._reduce = reduce

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if self._reduce is not None and (reduced := self._reduce(obj)) is not NotImplemented:
            return reduced
        return super().reducer_override(obj)
