"""The failure policy of a run: creates it from the configuration, and checks its decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from drivetrain._base.failure import Failure, one_line
from drivetrain._hooks.policy import FailurePolicy, FunctionPolicy, RetryBudget
from drivetrain._plugins.loading import create_object, create_plugin
from drivetrain._plugins.signatures import find_wrong_function, find_wrong_method
from drivetrain.config import FailureConfig
from drivetrain.errors import PluginBrokenError

__all__ = ["Decision", "ask", "make_policy"]


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
