"""Pickling of train functions, configurations and tasks.

Names that a facade of drivetrain re-exports are pickled as names of the facade, and not of the internal module that
defines them. So ``restore`` can load a run that was written before a file has moved. Configurations are pickled by the
names of their fields, so it can also load a run that was written before a field was added.
"""

from __future__ import annotations

import functools
import importlib
import io
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["dumps"]

_FACADES = ("drivetrain.loggers", "drivetrain.plugin", "drivetrain")
"""The modules that re-export names. If several have the same name, the last one counts."""


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
    """Pickles public names of drivetrain by their facade, and modules of special classes by name.

    An example of the latter is ``torch.backends.cudnn``.
    """

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._reduce = reduce

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, (type, FunctionType)) and _is_public(obj):
            return pkgutil.resolve_name, (_public_names()[obj.__module__, obj.__qualname__],)
        if is_dataclass(obj) and hasattr(type(obj), "__slots__") and _is_public(type(obj)):
            # By default, the values of such an object are pickled as a list, in the order of the fields.
            values = {field.name: getattr(obj, field.name) for field in fields(obj)}
            make: Callable[..., Any] = type(obj)
            return functools.partial(make, **values), ()
        if self._reduce is not None and (reduced := self._reduce(obj)) is not NotImplemented:
            return reduced
        return super().reducer_override(obj)


def _is_public(obj: type | FunctionType) -> bool:
    return (obj.__module__, obj.__qualname__) in _public_names()


@functools.cache
def _public_names() -> dict[tuple[str, str], str]:
    """The public path of each name that a facade re-exports, such as ``drivetrain:Checkpoint``, by module and name."""
    return {
        (module, name): f"{facade}:{name}"
        for facade in _FACADES
        for module, names in vars(importlib.import_module(facade))["_SOURCES"].items()
        for name in names.split()
    }
