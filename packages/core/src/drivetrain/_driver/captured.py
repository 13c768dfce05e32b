"""Finds the objects that a train function uses, so that an error can name the one that cannot be sent to workers."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from drivetrain._driver.functions import values_of_config

__all__ = ["UsedObject", "parts_of", "used_objects"]

_MAX_PARTS = 10_000


class UsedObject(NamedTuple):
    """An object that a train function uses.

    Attributes:
        name: the place of the object in the user's code, for messages.
        value: the object.
    """

    name: str
    value: Any


def used_objects(function: Callable[..., Any], config: Any) -> Iterator[UsedObject]:
    """Yield the values of the config and the objects that a train function captures, has as attributes or refers to.

    The function may be wrapped by ``functools.partial``, a method, or an object with ``__call__``. The search includes
    the functions of the same module that the train function calls, but not the attributes of its objects' attributes.
    """
    for key, value in values_of_config(config).items():
        place = f"[{key!r}]" if isinstance(config, Mapping) else f".{key}"
        yield UsedObject(f"train_loop_config{place}", value)
    yield from _used_by(function, "the train function", set())


def parts_of(value: Any) -> Iterator[Any]:
    """Yield a value, the items of containers in it, and the attributes of objects in it, up to a number of parts."""
    seen: dict[int, Any] = {}
    queue = deque([value])
    while queue and len(seen) < _MAX_PARTS:
        part = queue.popleft()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type, ModuleType)):
            continue
        seen[id(part)] = part
        yield part
        if isinstance(part, dict):
            inner: Iterable[Any] = part.values()
        elif isinstance(part, (list, tuple, set, frozenset)):
            inner = part
        else:
            attributes = getattr(part, "__dict__", None)
            inner = attributes.values() if isinstance(attributes, dict) and not inspect.isroutine(part) else ()
        queue.extend(itertools.islice(inner, _MAX_PARTS))


def _used_by(function: Any, who: str, seen: set[int]) -> Iterator[UsedObject]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        for number, value in enumerate(function.args, start=1):
            yield UsedObject(f"argument {number} of the functools.partial", value)
        for name, value in function.keywords.items():
            yield UsedObject(f"the argument {name!r} of the functools.partial", value)
        yield from _used_by(function.func, who, seen)
    elif isinstance(function, MethodType):
        yield from _attributes(function.__self__)
        yield from _used_by(function.__func__, who, seen)
    elif isinstance(function, FunctionType):
        yield from _captured_by(function, who, seen)
    elif not inspect.isroutine(function):
        yield from _attributes(function)
        yield from _used_by(getattr(type(function), "__call__", None), who, seen)  # noqa: B004 - not a check


def _attributes(owner: Any) -> Iterator[UsedObject]:
    kind = owner if isinstance(owner, type) else type(owner)
    for name, value in getattr(owner, "__dict__", {}).items():
        if not inspect.isroutine(value):
            yield UsedObject(f"the attribute {name!r} of {kind.__qualname__}", value)


def _captured_by(function: FunctionType, who: str, seen: set[int]) -> Iterator[UsedObject]:
    nonlocals = inspect.getclosurevars(function).nonlocals
    # getclosurevars() takes the names of attributes for globals, and does not look into functions within the function.
    globals = {
        name: function.__globals__[name] for name in _global_names(function.__code__) if name in function.__globals__
    }
    for name, value in nonlocals.items():
        yield UsedObject(f"{name!r}, which {who} captures", value)
    for name, value in globals.items():
        yield UsedObject(f"the global {name!r}, which {who} uses", value)
    for value in (*nonlocals.values(), *globals.values()):
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _used_by(value, f"{value.__name__}()", seen)


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
