"""A backend that wraps another one must pass on everything that a run asks of a backend."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.plugin import Backend
from drivetrain.plugin.backends import WrappedBackend

PUBLIC = {name: value for name, value in vars(Backend).items() if not name.startswith("_")}
METHODS = {name for name, value in PUBLIC.items() if inspect.isfunction(value)}


class Recording(Backend):
    """A backend that records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def session(self, *arguments: Any) -> Any:
        raise NotImplementedError


def _recording(name: str) -> Callable[..., None]:
    return lambda self, *arguments: self.calls.append((name, arguments))


for method in METHODS:
    setattr(Recording, method, _recording(method))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_wrapped_backend_passes_on_every_method(name: str) -> None:
    inner = Recording()
    arguments = [object() for _ in list(inspect.signature(getattr(Backend, name)).parameters)[1:]]

    getattr(WrappedBackend(inner), name)(*arguments)

    assert inner.calls == [(name, tuple(arguments))]


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - METHODS))
def test_wrapped_backend_has_every_attribute_of_the_other_one(name: str) -> None:
    inner = Recording()
    value = object()
    setattr(inner, name, value)

    assert getattr(WrappedBackend(inner), name) is value
