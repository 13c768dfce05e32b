"""The train function and its config, before a run starts.

:func:`check_function` checks that workers can call the function, and that the call runs it to its end.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = ["check_function", "copy_config", "values_of_config"]

_UNFINISHED = {
    "a coroutine function (async def)": inspect.iscoroutinefunction,
    "a generator function (with yield)": inspect.isgeneratorfunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}
_RUNNERS = frozenset({"run", "run_sync", "run_until_complete", "list", "tuple", "deque", "next"})
"""Names of functions with which a decorator can run a coroutine or a generator."""


def check_function(function: object) -> None:
    """Check that a train function takes no argument or the config, and is neither a coroutine nor a generator function.

    Raises:
        ConfigurationError: it is something else. The message says what to change.
    """
    if not callable(function):
        raise ConfigurationError(f"[DT-104] train_loop_per_worker: expected a function, got {function!r}")
    name = getattr(function, "__qualname__", repr(function))
    for layer in _layers(function):
        for kind, matches in _UNFINISHED.items():
            if matches(layer):
                raise ConfigurationError(
                    f"[DT-104] train_loop_per_worker: expected a function that trains when it is called, got {name}, "
                    f"{kind}. Use a normal function, and run the other one in it, for example with asyncio.run() or a "
                    "loop"
                )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    if (problem := _find_problem(signature)) is not None:
        raise ConfigurationError(
            "[DT-104] train_loop_per_worker: expected a function with no argument, or with the config as its only "
            f"required argument, got {name}{signature}{problem}"
        )


def copy_config(config: object) -> Any:
    """Return a copy of the config of a train function, which later changes of the original do not affect.

    Raises:
        ConfigurationError: it is neither a mapping nor an object of a dataclass nor None.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if config is None or (is_dataclass(config) and not isinstance(config, type)):
        return copy.copy(config)
    remedy = "" if isinstance(config, type) or not hasattr(config, "__dict__") else ". Pass vars(...) of it"
    raise ConfigurationError(f"[DT-103] train_loop_config: expected a dict or a dataclass, got {config!r}{remedy}")


def values_of_config(config: Any) -> Mapping[str, Any]:
    """Return the values in the config of a train function by name: the items of a mapping, or the fields of an object.

    Args:
        config: a mapping, an object of a dataclass, or None.
    """
    if config is None or isinstance(config, Mapping):
        return config or {}
    names = [field.name for field in fields(config)]
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _find_problem(signature: inspect.Signature) -> str | None:
    """Return why a function cannot be called without arguments or with the config, as the end of a message."""
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p.name for p in positional if p.default is p.empty]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return ". Put the other values into train_loop_config"
    if not positional:
        only_keywords = not takes_any and any(p.kind is p.VAR_KEYWORD for p in parameters)
        return ". The config is passed by position: use `def train_func(config)`" if only_keywords else None
    first = positional[0]
    if first.default is first.empty or first.default is None or isinstance(first.default, Mapping):
        return None
    return (
        f", whose parameter {first.name!r} would receive the config. Use `def train_func(config)`, and read "
        "the values from the config"
    )


def _layers(function: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function and the functions that it calls: behind partials, methods, ``__call__`` and decorators."""
    while callable(function):
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            if _may_run(function):
                return
            function = function.__wrapped__
        elif inspect.isroutine(function) or inspect.isclass(function):
            return
        else:
            function = getattr(type(function), "__call__", None)  # noqa: B004 - not a check


def _may_run(decorated: Callable[..., Any]) -> bool:
    """Return True if the code of a decorator contains a loop, or calls a function that runs coroutines."""
    code = getattr(decorated, "__code__", None)
    if code is None:
        return True
    has_loop = any(instruction.opname == "FOR_ITER" for instruction in dis.get_instructions(code))
    return has_loop or not _RUNNERS.isdisjoint(code.co_names)
