"""Runs one test of a conformance kit for a broken plugin, and returns the message with which the kit rejects it."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest


def rejection(
    request: pytest.FixtureRequest,
    kit: type[Any],
    test: str,
    parameters: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> str:
    """Return the message of a test that must fail.

    Args:
        request: provides the fixtures of the test.
        kit: the class of the kit.
        test: the name of the test.
        parameters: the parameters of the test, by name.
        **attributes: what the class of a plugin's author defines: attributes, and methods without ``self``.
    """
    methods = {
        name: (lambda self, *given, value=value: value(*given))
        if inspect.isfunction(value) or isinstance(value, type)
        else value
        for name, value in attributes.items()
    }
    broken = type("TestBroken", (kit,), methods)
    method = getattr(broken(), test)
    arguments = dict(parameters or {})
    for name in inspect.signature(method).parameters.keys() - arguments:
        arguments[name] = request.getfixturevalue(name)
    with pytest.raises((Exception, pytest.fail.Exception)) as failed:
        method(**arguments)
    return str(failed.value)
