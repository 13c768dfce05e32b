"""The requirements of each group of entry points, and the reason why the object of a plugin does not meet them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from drivetrain._base.closest import closest
from drivetrain._base.failure import one_line

__all__ = ["find_problem"]


class _Expected(NamedTuple):
    """The requirements for the objects to which the entry points of a group refer.

    Attributes:
        what: a description for messages.
        methods: alternatives; the object must have all methods of one of them.
        is_class: True if the object must be a class.
        is_created: True if drivetrain creates an object of the class without arguments.
    """

    what: str
    methods: tuple[tuple[str, ...], ...] = ((),)
    is_class: bool = True
    is_created: bool = True


_EXPECTED = {
    "backend": _Expected("a drivetrain.plugin.BackendConfig class"),
    "trainer": _Expected("a drivetrain.DataParallelTrainer class", (("fit", "restore"),), is_created=False),
    "callback": _Expected("a drivetrain.Callback class", is_created=False),
    "dataset": _Expected("a drivetrain.plugin.DatasetProvider class"),
    "runtime": _Expected("a drivetrain.plugin.Runtime class", (("validate", "room", "launch"),)),
    "strategy": _Expected("a drivetrain_torch.ParallelStrategy class", (("wrap",),)),
    "framework": _Expected("a drivetrain.plugin.Framework class"),
    "policy": _Expected(
        "a drivetrain.plugin.FailurePolicy, or a function",
        (("decide",), ("__call__",)),
        is_class=False,
        is_created=False,
    ),
}
_FUNCTION = _Expected("a function", (("__call__",),), is_class=False, is_created=False)


def find_problem(loaded: Any, kind: str, name: str) -> str | None:
    """Return what is wrong with the object of a plugin; None if it is what its group requires.

    Args:
        loaded: the object.
        kind: the kind of the plugin.
        name: the name of its entry point.
    """
    expected = _EXPECTED.get(kind, _FUNCTION)
    if isinstance(loaded, type):
        wrong = _find_wrong_base(loaded, kind)
    elif expected.is_class:
        wrong = f"expected {expected.what}, got {_describe(loaded)}. Register the class itself"
    else:
        wrong = None
    wrong = wrong or _find_missing_methods(loaded, expected) or _find_wrong_signature(loaded, kind)
    if wrong is None and isinstance(loaded, type):
        wrong = _find_wrong_class(loaded, kind, expected)
    if wrong is None and kind == "command":
        wrong = _find_wrong_command(loaded, name)
    if kind in ("prepare", "framework") and "." in name:  # it would never be called
        root = name.partition(".")[0]
        wrong = f"expected the framework's root module as the name of the entry point. Name it {root!r}"
    return wrong


def _find_wrong_base(loaded: type, kind: str) -> str | None:
    from drivetrain._hooks.backend import Backend, BackendConfig
    from drivetrain._hooks.callback import Callback
    from drivetrain._hooks.dataset import DatasetProvider
    from drivetrain._hooks.framework import Framework

    bases: dict[str, tuple[str, tuple[type, ...]]] = {
        "backend": ("drivetrain.plugin.BackendConfig", (BackendConfig, Backend)),
        "callback": ("drivetrain.Callback", (Callback,)),
        "dataset": ("drivetrain.plugin.DatasetProvider", (DatasetProvider,)),
        "framework": ("drivetrain.plugin.Framework", (Framework,)),
    }
    if kind not in bases or issubclass(loaded, bases[kind][1]):
        return None
    name = bases[kind][0]
    return f"expected a subclass of {name}, got {_describe(loaded)}. Derive it from {name.rpartition('.')[2]}"


def _find_missing_methods(loaded: Any, expected: _Expected) -> str | None:
    missing = [[name for name in names if not _has_method(loaded, name)] for names in expected.methods]
    if not all(missing):
        return None
    nearest = min(missing, key=len)
    return f"expected {expected.what}, got {_describe(loaded)} without {_methods(nearest)}{_hint(loaded, nearest)}"


def _find_wrong_signature(loaded: Any, kind: str) -> str | None:
    """Return what is wrong with the parameters of a method, or of a function; None if they are correct."""
    from drivetrain._hooks.callback import Callback
    from drivetrain._hooks.dataset import DatasetProvider
    from drivetrain._hooks.framework import Framework
    from drivetrain._hooks.policy import FailurePolicy, FunctionPolicy
    from drivetrain._plugins.signatures import find_wrong_function, find_wrong_method

    interfaces: dict[str, type] = {"callback": Callback, "dataset": DatasetProvider, "policy": FailurePolicy}
    interfaces["framework"] = Framework
    if kind == "policy" and not isinstance(loaded, type) and not _has_method(loaded, "decide"):
        wrong = find_wrong_function(loaded, FunctionPolicy(loaded).decide)
        return None if wrong is None else f"{_describe(loaded)}: {wrong}"
    return find_wrong_method(loaded, interfaces[kind]) if kind in interfaces else None


def _find_wrong_class(loaded: Any, kind: str, expected: _Expected) -> str | None:
    """Return why drivetrain cannot create an object of a class; None if it can."""
    from drivetrain._hooks.backend import BackendConfig

    if loaded is not BackendConfig and getattr(loaded, "create", None) is BackendConfig.create:
        return f"{loaded.__qualname__} does not implement create(){_hint(loaded, ['create'])}"
    if kind == "trainer" and (refused := _refused_arguments(loaded)):
        return (
            f"{loaded.__qualname__}.__init__: expected the parameters {', '.join(refused)}, which restore() passes. "
            "Add **arguments, and pass them on"
        )
    if abstract := sorted(getattr(loaded, "__abstractmethods__", ())):
        return f"{loaded.__qualname__} does not implement {_methods(abstract)}{_hint(loaded, abstract)}"
    if expected.is_created and (needed := _required_arguments(loaded)):
        return (
            f"expected a class that can be created without arguments, got {loaded.__qualname__}({', '.join(needed)}). "
            "Give the arguments default values"
        )
    return None


def _find_wrong_command(function: Any, name: str) -> str | None:
    """Return why a function does not add a command; None if it adds the command to a parser that is not used."""
    import argparse  # not needed by other plugins

    commands = argparse.ArgumentParser().add_subparsers()
    try:
        function(commands)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by another package
        return f"{one_line(error)}. Expected a function with the parameter (commands) that adds a command"
    if list(commands.choices) != [name]:
        added = ", ".join(map(repr, commands.choices)) or "none"
        return (
            f"expected a function that adds only the command {name!r}, got {added}. Add one command, with the name of "
            "the entry point"
        )
    return None


def _has_method(loaded: Any, name: str) -> bool:
    # Every class has a method __call__ of its metaclass, which is not meant here.
    where = loaded.__mro__ if isinstance(loaded, type) else (*type(loaded).__mro__, loaded)
    return callable(getattr(loaded, name, None)) and any(name in getattr(place, "__dict__", ()) for place in where)


def _describe(loaded: Any) -> str:
    if isinstance(loaded, type):
        return f"the class {loaded.__qualname__}"
    if inspect.isroutine(loaded) or inspect.ismodule(loaded):
        return f"the {'module' if inspect.ismodule(loaded) else 'function'} {loaded.__name__}"
    return f"an object of {type(loaded).__qualname__}"


def _methods(names: Sequence[str]) -> str:
    return ", ".join(f"{name}()" for name in names)


def _hint(loaded: Any, missing: Sequence[str]) -> str:
    """Name the method that may be a misspelled version of a missing one."""
    own = [name for name in dir(loaded) if not name.startswith("_") and name not in missing]
    pairs = [(name, found) for name in missing if (found := closest(name, own, similarity=0.75))]
    return "".join(f". Is {found}() meant to be {name}()?" for name, found in pairs[:1])


def _refused_arguments(trainer: type) -> list[str]:
    """Return the arguments of every trainer that the constructor of a trainer does not accept."""
    parameters = inspect.signature(trainer.__init__).parameters  # type: ignore[misc]  # of a class that was checked
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return []
    return [name for name in ("scaling_config", "run_config") if name not in parameters]


def _required_arguments(kind: type) -> list[str]:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # a class that is implemented in C
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
