"""Decisions, as functions from facts: whether to try again after a failure, with how many workers, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain.config import FailureConfig, ScalingConfig

__all__ = ["FailurePolicy", "RetryBudget", "avoided_nodes", "target_size"]


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


def target_size(scaling: ScalingConfig, room: int) -> int:
    """How many workers a run is to have: as many as there is room for, within its bounds."""
    return max(scaling.min_workers, min(scaling.max_workers, room))


def avoided_nodes(history: Sequence[Failure], limit: int | None) -> frozenset[str]:
    """The nodes on which so many processes were lost that no worker should be placed there.

    Args:
        history: the root causes of the attempts so far.
        limit: of processes lost; None for no limit.
    """
    lost = Counter(failure.node_id for failure in history if failure.kind is FailureKind.INFRASTRUCTURE)
    return frozenset(node for node, count in lost.items() if node and limit is not None and count >= limit)
