"""Pickling of train functions, configurations and tasks.

A facade is a public module that re-exports names of internal modules. A re-exported name is pickled by its name in the
facade, not in the internal module that defines it. Therefore ``restore`` can load a run that was written before an
internal file moved. Configurations are pickled by the names of their fields, so ``restore`` can also load a run that
was written before a field was added.
"""

from __future__ import annotations

import functools
import importlib
import io
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from drivetrain._base.lazy import PUBLIC

__all__ = ["Pickler", "dumps"]


def dumps(value: Any, reduce: Callable[[Any], Any] | None = None) -> bytes:
    """Pickle a value, including functions and classes of scripts, so that other processes can unpickle it.

    Args:
        value: the value to pickle.
        reduce: called for each object. It returns a value like that of ``__reduce__``, or ``NotImplemented`` to pickle
            the object as usual.
    """
    data = io.BytesIO()
    Pickler(data, reduce).dump(value)
    return data.getvalue()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles public classes and functions of drivetrain by their name in a facade, and imported modules by name.

    cloudpickle itself pickles modules by name, but not instances of a subclass of the module type, such as
    ``torch.backends.cudnn``. Since version 3.1.3, cloudpickle replaces the file name of code by a constant. Tracebacks
    and debuggers need the real name.
    """

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._reduce = reduce

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, (type, FunctionType)) and _is_public(obj):
            return pkgutil.resolve_name, (f"{PUBLIC[obj.__module__, obj.__qualname__]}:{obj.__qualname__}",)
        if is_dataclass(obj) and hasattr(type(obj), "__slots__") and _is_public(type(obj)):
            # A dataclass with slots would be pickled as a list of values, which depends on the order of the fields.
            values = {field.name: getattr(obj, field.name) for field in fields(obj)}
            make: Callable[..., Any] = type(obj)
            return functools.partial(make, **values), ()
        if isinstance(obj, CodeType):
            return _keep_file_name(obj, *self.dispatch_table[CodeType](obj))
        if self._reduce is not None and (reduced := self._reduce(obj)) is not NotImplemented:
            return reduced
        return super().reducer_override(obj)


def _keep_file_name(code: CodeType, make: Callable[..., CodeType], arguments: Sequence[Any]) -> Any:
    """Return cloudpickle's reduction of a code object, with the original file name."""
    made = make(*arguments).co_filename
    return make, tuple(code.co_filename if argument == made else argument for argument in arguments)


def _is_public(obj: type | FunctionType) -> bool:
    return (obj.__module__, obj.__qualname__) in PUBLIC
