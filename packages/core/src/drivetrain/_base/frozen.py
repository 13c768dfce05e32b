"""An error with a remedy for code that changes a configuration."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

from drivetrain.errors import ConfigurationError

__all__ = ["explains_assignment"]

T = TypeVar("T")


class AssignmentError(ConfigurationError, FrozenInstanceError):
    """The error of a frozen dataclass, with a remedy."""


def explains_assignment(cls: type[T]) -> type[T]:
    """Make a frozen dataclass say what to do instead of an assignment to one of its fields. Use it as a decorator."""

    def refuse(self: T, name: str, value: Any) -> NoReturn:
        raise AssignmentError(
            f"[DT-140] {type(self).__name__}: expected no change of an existing configuration, got an assignment to "
            f"{name!r}. Create a changed copy with dataclasses.replace(config, {name}=...). ray.tune.Tuner changes the "
            "configurations that it receives: pass it ray.tune.RunConfig(...), and this configuration to the trainer"
        )

    cls.__setattr__ = refuse  # type: ignore[assignment, method-assign]
    return cls
