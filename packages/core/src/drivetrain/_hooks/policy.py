"""Decisions after a failure: whether to start another attempt, and on which nodes to place no workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain.config import FailureConfig

__all__ = ["FailurePolicy", "RetryBudget", "avoided_nodes"]


class FailurePolicy(Protocol):
    """Decides whether to retry after a failure. Pass an object with ``decide`` as ``FailureConfig(policy=...)``."""

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """Return True to start another attempt.

        Args:
            failure: the root cause of the attempt that just failed.
            history: the root causes of the earlier failed attempts, oldest first.
        """
        ...


class RetryBudget:
    """Retries until the limits of :class:`~drivetrain.FailureConfig` are reached."""

    def __init__(self, config: FailureConfig) -> None:
        self._failures = 0 if config.fail_fast else config.max_failures
        self._preemptions = config.max_preemptions

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """Return True if the limit is not reached. Preemptions and other failures have separate limits."""
        preempted = failure.kind is FailureKind.PREEMPTION
        limit = self._preemptions if preempted else self._failures
        before = sum((earlier.kind is FailureKind.PREEMPTION) is preempted for earlier in history)
        return limit < 0 or before < limit


def avoided_nodes(history: Sequence[Failure], limit: int | None) -> frozenset[str]:
    """Return the ids of the nodes that the next attempts avoid, because losses on them caused too many failures.

    Args:
        history: the root causes of the failures so far.
        limit: the number of failures, caused by lost processes on a node, after which that node is avoided; None to
            avoid no node.
    """
    lost = Counter(failure.node_id for failure in history if failure.kind is FailureKind.INFRASTRUCTURE)
    return frozenset(node for node, count in lost.items() if node and limit is not None and count >= limit)
