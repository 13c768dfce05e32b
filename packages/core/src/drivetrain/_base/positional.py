"""Positional arguments for classes whose fields are keyword-only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["accepts_positional"]

T = TypeVar("T")


def accepts_positional(*names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a constructor accept some keyword arguments by position, as in Ray Train.

    The documented signature of the class does not change: scripts should pass keywords.

    Args:
        names: the names of the arguments, in the order of their positions.
    """

    def decorate(cls: type[T]) -> type[T]:
        create: Callable[..., None] = cls.__init__

        @functools.wraps(create)
        def initialize(self: T, *args: Any, **arguments: Any) -> None:
            if len(args) > len(names):
                raise TypeError(
                    f"{cls.__name__}: expected at most {len(names)} positional arguments ({', '.join(names)}), got "
                    f"{len(args)}. Pass the others by name"
                )
            given = dict(zip(names, args))  # noqa: B905 - there may be fewer arguments
            if twice := given.keys() & arguments.keys():
                raise TypeError(f"{cls.__name__}: expected one value for {sorted(twice)[0]}, got two")
            create(self, **given, **arguments)

        cls.__init__ = initialize  # type: ignore[assignment, method-assign]
        return cls

    return decorate
