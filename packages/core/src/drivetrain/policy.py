"""Decisions, as functions from facts: whether to try again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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
    """Retries until the budget of :class:`~drivetrain.FailureConfig` is used up."""

    def __init__(self, config: FailureConfig) -> None:
        self._limit = 0 if config.fail_fast else config.max_failures

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """True while fewer than ``max_failures`` attempts have failed before this one."""
        return self._limit < 0 or len(history) < self._limit
