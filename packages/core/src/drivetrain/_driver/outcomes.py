"""How an attempt or a run can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._base.failure import Failure

__all__ = ["AttemptFailed", "Ending", "Grow", "RunFailed", "Succeeded"]


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The training succeeded.

    Attributes:
        metrics: the last metrics that rank 0 reported; None if rank 0 never reported.
        return_values: the return values of the train function, by rank.
    """

    metrics: dict[str, Any] | None
    return_values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed.

    Attributes:
        failure: the root cause.
        notes: further lines for the error message, about other failures and ranks that had already finished.
        ranks: the failures of all ranks that failed, the root cause first.
    """

    failure: Failure
    notes: tuple[str, ...] = ()
    ranks: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Grow:
    """The attempt ended after a commit because the cluster has room for more workers, which the next attempt uses.

    Attributes:
        size: the number of workers of the next attempt.
    """

    size: int


Ending = Succeeded | AttemptFailed | Grow
"""How an attempt ended."""


@dataclass(frozen=True, slots=True)
class RunFailed:
    """The run failed, and is not retried.

    Attributes:
        failure: the root cause of the last attempt.
        notes: see :class:`AttemptFailed`.
        history: the root causes of the earlier failures, oldest first.
        ranks: see :class:`AttemptFailed`.
    """

    failure: Failure
    notes: tuple[str, ...] = ()
    history: tuple[Failure, ...] = ()
    ranks: tuple[Failure, ...] = ()
