"""How an attempt or a run can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._base.failure import Failure

__all__ = ["AttemptFailed", "Ending", "Grow", "RunFailed", "Succeeded", "one_line"]


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The training succeeded.

    Attributes:
        metrics: the metrics that rank 0 reported last; None if it never reported.
        return_values: the values of the train function, by rank.
    """

    metrics: dict[str, Any] | None
    return_values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed.

    Attributes:
        failure: the root cause.
        notes: a line for each other rank that had failed or finished by then.
    """

    failure: Failure
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grow:
    """There is room for more workers, and the next attempt can resume from a new checkpoint.

    Attributes:
        size: for how many.
    """

    size: int


Ending = Succeeded | AttemptFailed | Grow
"""How an attempt ended."""


@dataclass(frozen=True, slots=True)
class RunFailed:
    """The run failed: there was no further attempt.

    Attributes:
        failure: the root cause of the last attempt.
        notes: see :class:`AttemptFailed`.
        history: the root causes of the attempts before.
    """

    failure: Failure
    notes: tuple[str, ...] = ()
    history: tuple[Failure, ...] = ()


def one_line(error: BaseException) -> str:
    """The type of an exception, and the first line of its message."""
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
