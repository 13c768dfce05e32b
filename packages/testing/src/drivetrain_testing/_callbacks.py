"""The conformance kit for callbacks, as tests that a plugin inherits.

A plugin author writes a class with one method, and pytest collects the tests::

    from drivetrain_testing import CallbackConformance

    class TestMyCallback(CallbackConformance):
        name = "webhook"  # its entry point in drivetrain.callbacks
        options = {"url": "http://127.0.0.1:9/"}

A callback without an entry point defines ``make_callback`` instead::

        def make_callback(self):
            return MyCallback(url="http://127.0.0.1:9/")

A test that cannot pass for a callback must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, ClassVar

import pytest

from drivetrain import Callback, FailureConfig, RunCancelledError, ScalingConfig, TrainingFailedError, report
from drivetrain.plugin.checks import find_wrong_method, interface_of, one_line, unknown_hooks
from drivetrain.plugin.installed import create_plugin
from drivetrain.plugin.trainers import dumps
from drivetrain_testing._checks import check_equal
from drivetrain_testing._cleanup import assert_nothing_left
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import STEPS, IntendedError, make_trainer, run_two_workers

__all__ = ["HOOKS", "CallbackConformance", "check_hooks", "check_pickling"]

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
_START_S = 60.0
_MANY_REPORTS = 400
_BLOCKING = {"sleep", "fsync", "fdatasync", "fork_exec", "connect", "recv", "recv_into", "poll", "select"}
"""Names of built-in functions that wait for a disk, a process or another machine."""


class CallbackConformance:
    """Tests of a callback in real runs of two workers. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.callbacks``; empty for a callback without an entry point.
        options: the options with which users select it, as in ``RunConfig(callbacks=[(name, options)])``.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.name and cls.make_callback is CallbackConformance.make_callback:
            raise TypeError(f"{cls.__name__}: expected an attribute `name`, or a method make_callback(), got neither")
        check_overrides(cls, CallbackConformance)

    def make_callback(self) -> Callback:
        """Create the callback. By default, the entry point :attr:`name` is created with :attr:`options`."""
        callback: Callback = create_plugin("callback", self.name, self.options)
        return callback

    def test_is_created_without_a_run(self, tmp_path: Path) -> None:
        with assert_nothing_left(tmp_path / "temporary", of="the constructor"):
            callback = self.make_callback()
        assert isinstance(callback, Callback), (
            f"make_callback(): expected a drivetrain.Callback, got {callback!r}. Derive the class from Callback"
        )

    def test_is_selected_by_its_name(self, tmp_path: Path) -> None:
        if not self.name:
            pytest.skip(f"{type(self).__name__} declares no name")
        made = create_plugin("callback", self.name, self.options)
        assert isinstance(made, type(self.make_callback())), (
            f"the callback {self.name!r}: expected a {type(self.make_callback()).__name__}, got {made!r}"
        )
        run_two_workers(tmp_path, callbacks=[(self.name, self.options)])

    def test_hooks_are_spelled_correctly_and_accept_their_arguments(self) -> None:
        check_hooks(self.make_callback())

    def test_can_be_pickled_with_the_configuration_of_the_run(self) -> None:
        check_pickling(self.make_callback(), "RunConfig(callbacks=...)")

    def test_observes_a_run_that_is_retried(self, tmp_path: Path) -> None:
        spy = _Spy(self.make_callback())
        result = run_two_workers(tmp_path, failures=1, callbacks=[spy.callback])
        spy.assert_no_problems()
        attempt = ["on_group_start", "on_resume", "on_report", "on_checkpoint", "on_group_stop", "on_failure"]
        check_equal("the hooks that were called", set(spy.calls), {"on_run_start", *attempt, "on_run_end"})
        check_equal("the number of retries", result.metrics["attempt"], 1)
        check_equal("the last step", result.metrics["step"], STEPS)

    def test_leaves_the_metrics_unchanged(self, tmp_path: Path) -> None:
        spy = _Spy(self.make_callback())
        run_two_workers(tmp_path, callbacks=[spy.callback])
        assert not spy.changes, (
            f"on_report: expected to leave report.metrics unchanged, got a change {spy.changes[0]}. Copy the metrics "
            "first: metrics = dict(report.metrics)"
        )

    def test_observes_a_run_that_fails(self, tmp_path: Path) -> None:
        spy = _Spy(self.make_callback())
        with pytest.raises(TrainingFailedError) as failed:
            run_two_workers(tmp_path, failures=1, failure_config=FailureConfig(), callbacks=[spy.callback])
        spy.assert_no_problems()
        check_equal("the cause of the failure", type(failed.value.__cause__), IntendedError)
        check_equal("the last hooks", spy.calls[-2:], ["on_failure", "on_run_end"])

    def test_observes_a_run_that_is_cancelled(self, tmp_path: Path) -> None:
        spy = _Spy(self.make_callback())
        run = make_trainer(tmp_path, pause=True, callbacks=[spy.callback]).start()
        started = spy.reported.wait(_START_S)
        run.cancel()
        with pytest.raises(RunCancelledError):
            run.result(_START_S)
        assert started, f"on_report was not called within {_START_S:g} s"
        spy.assert_no_problems()
        check_equal("the last hook", spy.calls[-1], "on_run_end")

    def test_observes_a_run_that_is_resumed(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailedError):
            run_two_workers(tmp_path, failures=1, failure_config=FailureConfig(), callbacks=[self.make_callback()])
        spy = _Spy(self.make_callback())
        run_two_workers(tmp_path, resume="must", callbacks=[spy.callback])
        spy.assert_no_problems()
        check_equal("the first hooks", spy.calls[:3], ["on_run_start", "on_group_start", "on_resume"])

    def test_one_object_observes_two_runs(self, tmp_path: Path) -> None:
        callback = self.make_callback()
        run_two_workers(tmp_path / "first", callbacks=[callback])
        spy = _Spy(callback)
        run_two_workers(tmp_path / "second", callbacks=[callback])
        spy.assert_no_problems("in the second run with the same object, ")

    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        run_two_workers(tmp_path / "before")  # starts the processes that all runs of a driver share
        callback = self.make_callback()
        with assert_nothing_left(tmp_path / "temporary", of=type(callback).__name__):
            run_two_workers(tmp_path / "run", failures=1, callbacks=[callback])

    def test_a_report_costs_the_same_throughout_a_long_run(self, tmp_path: Path) -> None:
        """Count the function calls in ``on_report``: a time limit would depend on the machine."""
        callback = self.make_callback()
        costs = _count_calls_in_on_report(callback)
        trainer = make_trainer(tmp_path, workers=0, callbacks=[callback])
        trainer.vary({}, train_loop_per_worker=_report_many, scaling_config=ScalingConfig(num_workers=0)).fit()
        size = _MANY_REPORTS // 4
        early, late = (sum(part, Counter()) for part in (costs[:size], costs[-size:]))
        assert late.total() <= 2 * early.total() + 10 * size, (
            f"on_report: expected the same number of function calls for each report, got {early.total() / size:.0f} "
            f"calls for each early report and {late.total() / size:.0f} for each late one. Keep no list of all reports"
        )
        blocking = {name: count for name, count in late.items() if name in _BLOCKING and count > size / 10}
        assert not blocking, (
            f"on_report: expected to return at once, got {blocking} calls of blocking functions in {size} reports. "
            "Derive from drivetrain_track.TrackerCallback, which has its own thread"
        )


def check_hooks(callback: object) -> None:
    """Check that a callback overrides only existing hooks, with parameters that accept the arguments of the hooks."""
    unknown = unknown_hooks(callback)
    assert not unknown, "\n".join(unknown)
    wrong = find_wrong_method(callback, interface_of(callback))
    assert wrong is None, wrong


def check_pickling(value: object, field: str) -> None:
    """Check that an object can be pickled. Otherwise, ``restore`` cannot load the configuration that contains it."""
    try:
        pickle.loads(dumps(value))
    except Exception as error:  # a user's object may raise any exception
        pytest.fail(
            f"{type(value).__qualname__}: expected an object that can be pickled, got {one_line(error)}. Otherwise, "
            f"restore() cannot load {field}. Leave out connections and files in __getstate__()"
        )


class _Spy:
    """Records the calls of a callback's hooks, what they raise, and how they change the metrics.

    The hooks of the object itself are replaced, because drivetrain treats a callback according to its class. Exceptions
    are kept from the run, so that the remaining hooks are called too.
    """

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.calls: list[str] = []
        self.changes: list[str] = []
        self.reported = threading.Event()
        self._problems: list[str] = []
        for hook in HOOKS:
            setattr(callback, hook, MethodType(self._watched(hook, getattr(callback, hook)), callback))

    def assert_no_problems(self, when: str = "") -> None:
        """Fail if a hook has raised."""
        assert not self._problems, f"{type(self.callback).__qualname__}: {when}{'; '.join(self._problems)}"

    def _watched(self, hook: str, original: Callable[..., None]) -> Callable[..., None]:
        def call(callback: Callback, *arguments: Any) -> None:
            self.calls.append(hook)
            before = copy.deepcopy(arguments[1].metrics) if hook == "on_report" else None
            try:
                original(*arguments)
            except Exception as error:  # of the plugin
                self._problems.append(f"{hook}() raised {one_line(error)}")
            if before is not None:
                if repr(before) != repr(arguments[1].metrics):
                    self.changes.append(f"from {before} to {arguments[1].metrics}")
                self.reported.set()

        return call


def _count_calls_in_on_report(callback: Callback) -> list[Counter[str]]:
    """Replace the hook of an object. Return a list that gets the calls by name of function, for each report."""
    counts: list[Counter[str]] = []
    original = callback.on_report

    def counted(_: Callback, *arguments: Any) -> None:
        calls: Counter[str] = Counter()

        def profile(frame: FrameType, event: str, function: Any) -> None:
            if event == "call":
                calls[frame.f_code.co_name] += 1
            elif event == "c_call":
                calls[function.__name__] += 1

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            original(*arguments)
        finally:
            sys.setprofile(before)
        counts.append(calls)

    callback.on_report = MethodType(counted, callback)  # type: ignore[method-assign]
    return counts


def _report_many(config: dict[str, Any]) -> None:
    for step in range(_MANY_REPORTS):
        report({"loss": 1 / (step + 1), "step": step})
