"""Pickling of train functions, configurations and tasks.

Names that a facade of drivetrain re-exports are pickled by their name in the facade, not in the internal module that
defines them. Therefore ``restore`` can load a run that was written before an internal file moved. Configurations are
pickled by the names of their fields, so ``restore`` can also load a run that was written before a field was added.
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
"""The modules that re-export names. If several re-export the same name, the last one is used."""


def dumps(value: Any, reduce: Callable[[Any], Any] | None = None) -> bytes:
    """Pickle a value, including functions and classes of scripts, so that other processes can unpickle it.

    Args:
        value: the value to pickle.
        reduce: returns how to pickle an object, like ``__reduce__``, or ``NotImplemented``.
    """
    data = io.BytesIO()
    _Pickler(data, reduce).dump(value)
    return data.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles public names of drivetrain by their facade, and instances of subclasses of the module type by name.

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
    """Return the public path of each re-exported name, such as ``drivetrain:Checkpoint``, by module and name."""
    return {
        (module, name): f"{facade}:{name}"
        for facade in _FACADES
        for module, names in vars(importlib.import_module(facade))["_SOURCES"].items()
        for name in names.split()
    }
