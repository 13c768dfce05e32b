"""The conformance kit for policies: the built-in policy and a backoff pass; broken policies are rejected by name."""

import functools
import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from drivetrain import FailureConfig
from drivetrain._driver.policies import RetryBudget
from drivetrain.plugin import Failure
from drivetrain_testing import PolicyConformance
from tests.kits.rejecting import rejection


class TestRetryBudget(PolicyConformance):
    def make_policy(self) -> Any:
        return RetryBudget(FailureConfig(max_failures=3))


def back_off(failure: Failure, history: Sequence[Failure]) -> float:
    return float(min(60, 2 ** min(len(history), 10)) * random.uniform(0.5, 1))


class TestBackoff(PolicyConformance):
    ends = False

    def make_policy(self) -> Any:
        return back_off


def returning(value: Any, *_: Any) -> Any:
    return value


class MutatesTheHistory:
    def decide(self, failure: Failure, history: Any) -> bool:
        history.append(failure)
        return len(history) < 5


class CountsItsCalls:
    def __init__(self) -> None:
        self.numbers = itertools.count()

    def decide(self, failure: Failure, history: Any) -> bool:
        return next(self.numbers) < 5


class HoldsALock:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def decide(self, failure: Failure, history: Any) -> bool:
        return not history


def retry_at_once(failure: Failure, history: Sequence[Failure]) -> bool:
    return True


def raise_for_a_lost_process(failure: Failure, history: Sequence[Failure]) -> bool:
    return failure.exception.args[0] != "fatal" and len(history) < 3  # type: ignore[union-attr]


def overflow(failure: Failure, history: Sequence[Failure]) -> float:
    return 2.0 ** len(history) if len(history) < 100 else float("1e308") * 10


RETURNS = "test_returns_a_decision_for_every_kind_of_failure"
EXPECTED = "decide(): expected True, False or a finite number of seconds >= 0, got "
BROKEN = [
    (functools.partial(returning, -1), RETURNS, EXPECTED + "-1"),
    (functools.partial(returning, math.nan), RETURNS, EXPECTED + "nan"),
    (functools.partial(returning, None), RETURNS, EXPECTED + "None"),
    (functools.partial(returning, "retry"), RETURNS, EXPECTED + "'retry'"),
    (overflow, RETURNS, EXPECTED + "inf for a failure of the kind"),
    (
        raise_for_a_lost_process,
        RETURNS,
        "decide() raised AttributeError: 'NoneType' object has no attribute 'args' for a",
    ),
    (
        MutatesTheHistory(),
        "test_leaves_its_arguments_unchanged",
        "expected to leave the history of 0 failures unchanged",
    ),
    (CountsItsCalls(), "test_decides_by_its_arguments_alone", "Use the history instead of counting calls"),
    (retry_at_once, "test_does_not_retry_forever_without_a_delay", "Return False at some point, or declare ends"),
    (HoldsALock(), "test_can_be_pickled_with_the_configuration_of_the_run", "expected an object that can be pickled"),
]


@pytest.mark.parametrize(("policy", "test", "message"), BROKEN)
def test_broken_policy_is_rejected(
    request: pytest.FixtureRequest, policy: Callable[..., Any], test: str, message: str
) -> None:
    assert message in rejection(request, PolicyConformance, test, make_policy=lambda: policy)


def test_policy_that_retries_forever_must_back_off(request: pytest.FixtureRequest) -> None:
    test = "test_does_not_retry_forever_without_a_delay"
    message = rejection(request, PolicyConformance, test, make_policy=lambda: retry_at_once, ends=False)
    assert "expected a delay of at least 1 s after 1000 attempts without progress, got 0 s" in message


def test_class_without_a_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an attribute `name`, or a method make_policy"):
        type("TestNothing", (PolicyConformance,), {})
