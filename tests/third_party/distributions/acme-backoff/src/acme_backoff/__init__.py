"""A failure policy that waits longer after each failure: ``FailureConfig(policy="exponential_backoff")``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile

from drivetrain import ConfigurationError, FailureKind
from drivetrain.plugin import Failure

__all__ = ["ExponentialBackoff"]


class ExponentialBackoff:
    """Retries with delays of ``first_s``, twice as long, and so on, until an attempt makes progress.

    Errors of the train function are not retried, because they would happen again.

    Args:
        first_s: the first delay in seconds; None for the value of the environment variable ``ACME_BACKOFF_FIRST_S``,
            or 5.
        max_s: the maximum delay in seconds.
        max_failures: the number of failures in a row, without progress, after which the run ends.
    """

    def __init__(self, first_s: float | None = None, *, max_s: float = 600.0, max_failures: int = 8) -> None:
        given = os.environ.get("ACME_BACKOFF_FIRST_S", "5") if first_s is None else first_s
        try:
            self._first_s = float(given)
        except ValueError as error:
            raise ConfigurationError(f"ACME_BACKOFF_FIRST_S: expected seconds, got {given!r}") from error
        self._max_s = max_s
        self._max_failures = max_failures

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Return the delay in seconds before the next attempt, or False to end the run."""
        if failure.kind is FailureKind.USER_ERROR:
            return False
        in_a_row = len(list(takewhile(lambda each: not each.made_progress, [failure, *reversed(history)])))
        if in_a_row >= self._max_failures:
            return False
        return min(self._max_s, self._first_s * 2.0 ** max(0, in_a_row - 1))
