"""The reactions to a failure: the policy decides about a retry, and the nodes that caused losses are avoided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, cast

from drivetrain._base.failure import Failure, one_line
from drivetrain._hooks.policy import FailurePolicy, FunctionPolicy
from drivetrain._plugins.loading import create_object, create_plugin
from drivetrain._plugins.signatures import find_wrong_function, find_wrong_method
from drivetrain.config import FailureConfig
from drivetrain.errors import FailureKind, PluginBrokenError

__all__ = ["Decision", "RetryBudget", "ask", "avoided_nodes", "make_policy"]

_MAX_BACKOFF_S = 60.0
_REPEATED = (
    "not retried again: the previous attempt ended with the same error at the same line, also before any report "
    "(max_failures=-1 retries it anyway)"
)


class Decision(NamedTuple):
    """A checked decision of a policy.

    Attributes:
        delay_s: seconds after which to retry; None to end the run.
        notes: what went wrong while the policy decided, as further lines of the run's error.
    """

    delay_s: float | None
    notes: tuple[str, ...] = ()


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


def make_policy(config: FailureConfig) -> FailurePolicy:
    """Return the configured policy: an object is created of a class, and a function becomes a policy.

    Raises:
        PluginError: a policy that is given by name is not installed, does not load, or is not a policy; or creating an
            object of the class failed.
    """
    given: Any = config.policy
    if given is None:
        return RetryBudget(config)
    where = _describe(config)
    if isinstance(given, (str, tuple)):
        name, options = (given, {}) if isinstance(given, str) else given
        given = create_plugin("policy", name, options)
    elif isinstance(given, type):
        given = create_object(given, where, "Pass an object instead", {})
    if callable(getattr(given, "decide", None)):
        policy = cast("FailurePolicy", given)
        problem = find_wrong_method(policy, FailurePolicy)
    elif callable(given):
        policy = FunctionPolicy(given)
        problem = find_wrong_function(given, policy.decide)
    else:
        problem = f"expected a function, or an object with decide(failure, history), got {given!r}"
    if problem is not None:
        raise PluginBrokenError(f"[DT-602] {where}: {problem}")
    return policy


def _describe(config: FailureConfig) -> str:
    """Return the place where the policy is configured, for messages; the name of the policy if it has one."""
    given = config.policy
    if isinstance(given, (str, tuple)):
        return f"policy {(given if isinstance(given, str) else given[0])!r}"
    return "FailureConfig(policy=...)"


def ask(policy: FailurePolicy, config: FailureConfig, failure: Failure, history: Sequence[Failure]) -> Decision:
    """Ask a policy. If it raises or returns something else than a decision, the run ends, and a note says why.

    Args:
        policy: the policy.
        config: the configuration that selects it.
        failure: see :meth:`FailurePolicy.decide`.
        history: see :meth:`FailurePolicy.decide`.
    """
    try:
        decided: object = policy.decide(failure, history)
        if not isinstance(decided, (bool, int, float)) and hasattr(decided, "item"):
            decided = decided.item()  # a scalar of NumPy or of a framework
    except Exception as error:  # raised by a user's policy
        return _refuse(config, f" raised {one_line(error)}")
    if isinstance(decided, bool):
        is_repeated = not decided and isinstance(policy, RetryBudget) and policy.is_repeated(failure, history)
        return Decision(0.0 if decided else None, (_REPEATED,) if is_repeated else ())
    if isinstance(decided, (int, float)) and 0 <= decided < math.inf:
        return Decision(float(decided))
    return _refuse(config, f": expected True, False or seconds >= 0, got {decided!r:.200}")


def _refuse(config: FailureConfig, problem: str) -> Decision:
    return Decision(None, (f"also: [DT-605] {_describe(config)}{problem}. The run is not retried",))


def avoided_nodes(history: Sequence[Failure], limit: int | None) -> frozenset[str]:
    """Return the ids of the nodes that the next attempts avoid, because losses on them caused too many failures.

    Args:
        history: the root causes of the failures so far.
        limit: the number of failures, caused by lost processes on a node, after which that node is avoided; None to
            avoid no node.
    """
    lost = Counter(failure.node_id for failure in history if failure.kind is FailureKind.INFRASTRUCTURE)
    return frozenset(node for node, count in lost.items() if node and limit is not None and count >= limit)
