"""Runs one test of a conformance kit for a broken plugin, and returns the message with which the kit rejects it."""

import inspect
from typing import Any

import pytest


def rejection(request: pytest.FixtureRequest, kit: type[Any], test: str, **attributes: Any) -> str:
    """Return the message of a test that must fail.

    Args:
        request: provides the fixtures of the test.
        kit: the class of the kit.
        test: the name of the test.
        **attributes: what the class of a plugin's author defines: attributes, and methods without ``self``.
    """
    methods = {
        name: (lambda self, *given, value=value: value(*given)) if callable(value) else value
        for name, value in attributes.items()
    }
    broken = type("TestBroken", (kit,), methods)
    method = getattr(broken(), test)
    arguments = {name: request.getfixturevalue(name) for name in inspect.signature(method).parameters}
    with pytest.raises((Exception, pytest.fail.Exception)) as failed:
        method(**arguments)
    return str(failed.value)
