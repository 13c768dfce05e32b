"""Decisions after a failure: whether and when to start another attempt, and on which nodes to place no workers."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain.config import FailureConfig

__all__ = ["FailurePolicy", "FunctionPolicy", "RetryBudget", "avoided_nodes"]

_MAX_BACKOFF_S = 60.0


class FailurePolicy(Protocol):
    """Decides whether and when to retry after a failure. Pass it as ``FailureConfig(policy=...)``."""

    @abstractmethod
    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Return whether to start another attempt, and when.

        Args:
            failure: the root cause of the attempt that just failed.
            history: the root causes of the earlier failed attempts, oldest first.

        Returns:
            False to end the run; True to retry at once; or a number of seconds, at least 0, after which to retry. The
            number 0 means the same as True.
        """
        ...


class FunctionPolicy:
    """A policy that calls a function.

    Args:
        function: called with the arguments of :meth:`FailurePolicy.decide`.
    """

    def __init__(self, function: Callable[[Failure, Sequence[Failure]], bool | float]) -> None:
        self._function = function

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """See :meth:`FailurePolicy.decide`."""
        return self._function(failure, history)


class RetryBudget:
    """Retries until the limits of :class:`~drivetrain.FailureConfig` are reached.

    The first retry after an attempt with progress starts at once. If that attempt makes no progress either, the next
    retry waits for ``retry_backoff_s``, and each further one twice as long, up to a minute. An attempt makes progress
    if it commits a checkpoint.

    A mistake in the code is not retried again if the attempt before ended with the same exception at the same line, and
    neither has made progress. With ``max_failures=-1``, it is retried like all other failures.
    """

    def __init__(self, config: FailureConfig) -> None:
        self._failures = 0 if config.fail_fast else config.max_failures
        self._preemptions = config.max_preemptions
        self._preemptions_without_progress = config.max_preemptions_without_progress
        self._backoff_s = config.retry_backoff_s

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Return the delay, or False if a limit is reached. Preemptions and other failures have separate limits."""
        preempted = failure.kind is FailureKind.PREEMPTION
        limit = self._preemptions if preempted else self._failures
        before = sum((earlier.kind is FailureKind.PREEMPTION) is preempted for earlier in history)
        if 0 <= limit <= before or self.is_repeated(failure, history):
            return False
        stuck = list(takewhile(lambda earlier: not earlier.made_progress, [failure, *reversed(history)]))
        preemptions = sum(earlier.kind is FailureKind.PREEMPTION for earlier in stuck)
        if preempted and 0 <= self._preemptions_without_progress < preemptions:
            return False
        return self._delay_s(len(stuck))

    def is_repeated(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """Return True if the attempt before ended with the same mistake, which a retry would only repeat."""
        return self._failures > 0 and bool(history) and failure.repeats(history[-1])

    def _delay_s(self, attempts: int) -> float:
        """Return the delay after a number of consecutive attempts without progress."""
        if attempts < 2:
            return 0.0
        return min(_MAX_BACKOFF_S, self._backoff_s * 2.0 ** min(attempts - 2, 30))


def avoided_nodes(history: Sequence[Failure], limit: int | None) -> frozenset[str]:
    """Return the ids of the nodes that the next attempts avoid, because losses on them caused too many failures.

    Args:
        history: the root causes of the failures so far.
        limit: the number of failures, caused by lost processes on a node, after which that node is avoided; None to
            avoid no node.
    """
    lost = Counter(failure.node_id for failure in history if failure.kind is FailureKind.INFRASTRUCTURE)
    return frozenset(node for node, count in lost.items() if node and limit is not None and count >= limit)
