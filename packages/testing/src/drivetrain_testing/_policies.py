"""The conformance kit for failure policies, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain_testing import PolicyConformance

    class TestMyPolicy(PolicyConformance):
        name = "backoff"  # its entry point in drivetrain.policies

A policy without an entry point defines ``make_policy`` instead::

        def make_policy(self):
            return Backoff(first_s=1.0)

A test that cannot pass for a policy must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import FailureConfig, FailureKind, Result
from drivetrain.plugin import Failure, FailurePolicy
from drivetrain.plugin.checks import make_policy, one_line
from drivetrain.plugin.installed import create_plugin
from drivetrain_testing._callbacks import check_pickling
from drivetrain_testing._checks import check_equal
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import make_trainer

__all__ = ["PolicyConformance"]

_MANY = 1000
_FAILURES = 2


class PolicyConformance:
    """Tests of a failure policy, alone and in a real run of two workers. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.policies``; empty for a policy without an entry point.
        options: the options with which users select it, as in ``FailureConfig(policy=(name, options))``.
        ends: True if the policy ends a run whose attempts fail again and again without progress. False if it retries
            forever; each retry must then be delayed by at least a second in the end.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    ends: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.name and cls.make_policy is PolicyConformance.make_policy:
            raise TypeError(f"{cls.__name__}: expected an attribute `name`, or a method make_policy(), got neither")
        check_overrides(cls, PolicyConformance)

    def make_policy(self) -> Any:
        """Return the policy: an object, a class or a function.

        By default, it is created from the entry point :attr:`name` with :attr:`options`.
        """
        return create_plugin("policy", self.name, self.options)

    def test_returns_a_decision_for_every_kind_of_failure(self) -> None:
        policy = self._create()
        for latest, history in _situations():
            try:
                decided: object = policy.decide(latest, history)
            except Exception as error:  # of the plugin
                pytest.fail(f"decide() raised {one_line(error)} for a failure of the kind {latest.kind.value!r}")
            assert isinstance(decided, bool) or _is_delay(decided), (
                f"decide(): expected True, False or a finite number of seconds >= 0, got {decided!r} for a failure of "
                f"the kind {latest.kind.value!r} after {len(history)} earlier failures"
            )

    def test_leaves_its_arguments_unchanged(self) -> None:
        policy = self._create()
        for latest, history in _situations():
            before = copy.copy(history)
            policy.decide(latest, history)
            assert history == before, (
                f"decide(): expected to leave the history of {len(before)} failures unchanged, got {len(history)} "
                "failures afterwards. Copy it first: list(history)"
            )

    def test_decides_by_its_arguments_alone(self) -> None:
        """Delays may be random, but whether a failure is retried must not depend on earlier calls, on other runs."""
        policy = self._create()
        first = [_retries(policy.decide(latest, history)) for latest, history in _situations()]
        second = [_retries(policy.decide(latest, history)) for latest, history in _situations()]
        assert first == second, (
            "decide(): expected the same decision for the same failure and history, got another one at the second "
            "call. Use the history instead of counting calls: one object may serve several runs"
        )

    def test_does_not_retry_forever_without_a_delay(self) -> None:
        policy = self._create()
        delays: list[float] = []
        history: list[Failure] = []
        latest = _failure(FailureKind.INFRASTRUCTURE)
        while len(history) < _MANY and _retries(decided := policy.decide(latest, history)):
            delays.append(0.0 if decided is True else float(decided))
            history.append(latest)
        ended = len(history) < _MANY
        assert ended or not self.ends, (
            f"decide(): expected to end a run whose attempts make no progress, got {_MANY} retries. Return False at "
            "some point, or declare ends = False and return growing delays"
        )
        assert ended or min(delays[-10:]) >= 1, (
            f"decide(): expected a delay of at least 1 s after {_MANY} attempts without progress, got {delays[-1]:g} s"
        )

    def test_can_be_pickled_with_the_configuration_of_the_run(self) -> None:
        check_pickling(self.make_policy(), "RunConfig(failure_config=FailureConfig(policy=...))")

    def test_decides_in_a_run_that_fails_twice(self, tmp_path: Path) -> None:
        watched = _Watched(self._create())
        result = _fit(tmp_path, watched)
        retries = watched.decisions.count(True)
        ended = "after a retry of each failure" if retries == _FAILURES else "with an error"
        assert (result.error is None) is (retries == _FAILURES), f"expected that the run ends {ended}: {result.error}"
        check_equal("the number of decisions", len(watched.decisions), min(_FAILURES, retries + 1))

    def test_is_selected_by_its_name(self) -> None:
        if not self.name:
            pytest.skip(f"{type(self).__name__} declares no name")
        made = make_policy(FailureConfig(policy=(self.name, self.options)))
        expected = self._create()
        assert type(made) is type(expected), f"the policy {self.name!r}: expected {expected!r}, got {made!r}"

    def _create(self) -> FailurePolicy:
        return make_policy(FailureConfig(policy=self.make_policy()))


class _Watched:
    """A policy that asks another one, records its decisions, and leaves out the delays."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self.decisions: list[bool] = []

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        decided = _retries(self._policy.decide(failure, history))
        self.decisions.append(decided)
        return decided


def _fit(directory: Path, policy: FailurePolicy) -> Result:
    config = FailureConfig(policy=policy)
    return make_trainer(directory, failures=_FAILURES, failure_config=config).fit(raise_on_failure=False)


def _situations() -> Iterator[tuple[Failure, list[Failure]]]:
    """Yield failures of every kind, with histories of various lengths, with and without progress."""
    for kind in FailureKind:
        for length in (0, 1, 2, 10, _MANY):
            for made_progress in (False, True):
                yield (
                    _failure(kind, made_progress=made_progress),
                    [_failure(kind, made_progress=made_progress) for _ in range(length)],
                )


def _failure(kind: FailureKind, *, made_progress: bool = False) -> Failure:
    lost = kind is FailureKind.INFRASTRUCTURE
    return Failure(
        kind=kind,
        summary=f"rank 1 failed: {kind.value}",
        rank=1,
        phase="training",
        time=1.0,
        exception=None if lost else RuntimeError(kind.value),
        node_id="node" if lost else "",
        made_progress=made_progress,
    )


def _is_delay(decided: object) -> bool:
    return isinstance(decided, (int, float)) and 0 <= decided < math.inf


def _retries(decided: object) -> bool:
    """Return True if a decision starts another attempt. The number 0 does, unlike False."""
    return decided is not False
