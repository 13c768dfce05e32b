"""Lets `drivetrain.prepare` give each worker its own stream of random numbers."""

from typing import Any

import drivetrain
from drivetrain.plugin.backends import is_instance_of

_prepared: list[Any] = []  # generators cannot be marked in another way


def prepare(value: Any) -> Any:
    """Return a generator whose numbers are independent of those on other ranks."""
    if not is_instance_of(value, "numpy.random", "Generator"):
        return NotImplemented
    if any(value is generator for generator in _prepared):
        return value
    context = drivetrain.get_context()
    streams = value.spawn(context.get_world_size())
    _prepared.append(streams[context.get_world_rank()])
    return _prepared[-1]
