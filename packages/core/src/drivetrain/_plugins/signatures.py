"""Checks, before a run starts, that the methods of a plugin can be called in the way in which drivetrain calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from drivetrain._base.closest import closest

__all__ = ["find_misspelled_method", "find_wrong_function", "find_wrong_method"]

_MIN_SIMILARITY = 0.8  # a plugin may have further methods of its own


def find_wrong_method(plugin: object, interface: type) -> str | None:
    """Return what is wrong with a method that a plugin defines in place of one of its interface; None if nothing is.

    Args:
        plugin: a class, or an object of a class.
        interface: the class that declares the methods.
    """
    kind = plugin if isinstance(plugin, type) else type(plugin)
    for name in dir(interface):
        declared, own = getattr(interface, name), getattr(kind, name, None)
        if name.startswith("_") or not inspect.isroutine(declared) or not inspect.isroutine(own) or own == declared:
            continue
        problem = _find_difference(own, _signature_of_call(kind, name), _signature_of_call(interface, name))
        if problem is not None:
            return f"{kind.__qualname__}.{name}: {problem}"
    return None


def find_misspelled_method(plugin: object, interface: type) -> str | None:
    """Return what is wrong if a method of a plugin has almost the name of an optional one; None if there is none.

    Args:
        plugin: an object of a class.
        interface: the class that declares the methods.
    """
    kind = type(plugin)
    own = [name for name in dir(kind) if not name.startswith("_") and inspect.isroutine(getattr(kind, name))]
    further = [name for name in own if not hasattr(interface, name)]
    inherited = [name for name in own if getattr(kind, name) == getattr(interface, name, None)]
    for name in further:
        if meant := closest(name, inherited, similarity=_MIN_SIMILARITY):
            return f"{kind.__qualname__}.{name}() is never called. Did you mean {meant}()?"
    return None


def find_wrong_function(function: Callable[..., Any], declared: Callable[..., Any]) -> str | None:
    """Return why a function cannot be called like another one; None if it can, or if its parameters are unknown."""
    return _find_difference(function, _signature(function), _signature(declared))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None if it is implemented in C and has none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _signature_of_call(kind: type, name: str) -> inspect.Signature | None:
    """Return the signature with which a method of an object is called: without ``self``."""
    signature = _signature(getattr(kind, name))
    if signature is None or isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod)):
        return signature
    parameters = list(signature.parameters.values())
    takes_any_number = bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    return signature if takes_any_number else signature.replace(parameters=parameters[1:])


def _find_difference(
    function: Callable[..., Any], own: inspect.Signature | None, expected: inspect.Signature | None
) -> str | None:
    if inspect.iscoroutinefunction(function):
        return "expected a normal function, got one with `async def`"
    if own is None or expected is None:
        return None
    parameters = expected.parameters.values()
    positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    keywords = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        own.bind(*positional, **keywords)
    except TypeError:
        return f"expected the parameters ({_names(expected)}), got ({_names(own)})"
    return None


def _names(signature: inspect.Signature) -> str:
    """Return the names of the parameters, without annotations and default values."""
    kept = [each.replace(annotation=each.empty, default=each.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(kept))[1:-1]
