"""Decisions, as functions from facts: whether to try again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain.config import FailureConfig
    from drivetrain.failure import Failure

__all__ = ["FailurePolicy", "RetryBudget"]


class FailurePolicy(Protocol):
    """Decides what follows a failure."""

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """Whether to start another attempt.

        Args:
            failure: the root cause of the attempt that just failed.
            history: the root causes of the attempts before it, oldest first.
        """
        ...


class RetryBudget:
    """Retries until the budgets of :class:`~drivetrain.FailureConfig` are used up."""

    def __init__(self, config: FailureConfig) -> None:
        self._failures = 0 if config.fail_fast else config.max_failures
        self._preemptions = config.max_preemptions

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """True while fewer attempts have ended before as this one has: by a preemption, or otherwise."""
        preempted = failure.kind is FailureKind.PREEMPTION
        limit = self._preemptions if preempted else self._failures
        before = sum((earlier.kind is FailureKind.PREEMPTION) is preempted for earlier in history)
        return limit < 0 or before < limit
