"""How an attempt or a run can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._base.failure import Failure

__all__ = ["Outcome", "Resize", "RunFailed", "Stop", "one_line"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run that succeeded leaves beside its directory."""

    metrics: dict[str, Any] | None
    return_values: Sequence[Any]


class RunFailed(Exception):
    """The last attempt failed.

    Attributes:
        failure: the root cause.
        notes: a line for each other rank that had failed or finished with it.
        history: the root causes of the attempts before.
    """

    def __init__(self, failure: Failure, notes: Sequence[str] = ()) -> None:
        super().__init__(failure.summary)
        self.failure = failure
        self.notes = tuple(notes)
        self.history: tuple[Failure, ...] = ()


class Resize(Exception):
    """There is room for more workers, and a checkpoint to go on from was just committed."""

    def __init__(self, size: int) -> None:
        super().__init__(f"there is room for {size} workers")
        self.size = size


class Stop(BaseException):
    """The stop condition is met; raised through the runtime, and in-process through the train function."""


def one_line(error: BaseException) -> str:
    """The type of an exception, and the first line of what it says."""
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
