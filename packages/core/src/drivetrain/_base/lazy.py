"""Support for modules that re-export names, and import the defining module only when a name is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

__all__ = ["PUBLIC", "lazy_names", "publish"]

PUBLIC: dict[tuple[str, str], str] = {}
"""For each re-exported name, by the module that defines it: the module that re-exports it, the outermost if several."""


def lazy_names(
    facade: str,
    sources: Mapping[str, str],
    submodules: str = "",
    then: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a module that re-exports names of other modules.

    Args:
        facade: the name of the module that re-exports the names.
        sources: a mapping from the name of a module to the names to re-export from that module, separated by spaces.
        submodules: the names of submodules of the facade to import when they are first used, separated by spaces.
        then: for a name, the ``module:function`` to call when it is first used.
    """
    module_of = {name: module for module, names in sources.items() for name in names.split()}
    for name, module in module_of.items():
        PUBLIC.setdefault((module, name), facade)  # a package is imported before its submodules
    inner = {name: f"{facade}.{name}" for name in submodules.split()}

    def get(name: str) -> Any:
        if name in module_of:
            value = getattr(import_module(module_of[name]), name)
        elif name in inner:
            value = import_module(inner[name])
        else:
            raise _missing(facade, name)
        setattr(sys.modules[facade], name, value)
        if name in then:
            module, _, function = then[name].partition(":")
            getattr(import_module(module), function)()
        return value

    def names() -> list[str]:
        """Return what completion shows: the public names, and not what the module itself imports."""
        special = {name for name in vars(sys.modules[facade]) if name.startswith("__")}
        return sorted({*special, *module_of, *inner})

    return get, names


def publish(facade: str) -> None:
    """Record the names that a module re-exports, so that they are pickled by their name in it. Call it at its end."""
    module = sys.modules[facade]
    for name in module.__all__:
        defined_in = getattr(getattr(module, name), "__module__", None)
        if isinstance(defined_in, str) and defined_in.startswith("drivetrain."):
            PUBLIC.setdefault((defined_in, name), facade)


def _missing(facade: str, name: str) -> AttributeError | ImportError:
    """Return the error about an unknown name, with a remedy if the name belongs to another package.

    ``from drivetrain import Trainer`` replaces every AttributeError by a message of its own, so it gets an ImportError.
    Everything else gets an AttributeError: ``hasattr``, and pickle, which looks up names in all modules.
    """
    from drivetrain._base.elsewhere import import_of

    statement = import_of(name)
    if statement is None:
        return AttributeError(f"module {facade!r} has no attribute {name!r}")
    import opcode

    caller = sys._getframe(2)
    if caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {facade!r}. Write: {statement}", name=name)
    return AttributeError(f"module {facade!r} has no attribute {name!r}. Write: {statement}")
