"""The conformance kit for trackers, as tests that a plugin inherits.

A plugin author writes a class with one method, and pytest collects the tests::

    from drivetrain_track.testing import TrackerConformance

    class TestMyTracker(TrackerConformance):
        def make_tracker(self, directory):
            return MyTracker(f"file:{directory}", token="s3cr3t-token")

Further tests run if the class can read what the service has received::

        secret = "s3cr3t-token"

        def read_metrics(self, directory, result):
            series = my_service.open(directory).series()
            return {name: [(point.step, point.value) for point in points] for name, points in series.items()}

        def read_status(self, directory, result):
            return my_service.open(directory).status

A test that cannot pass for a tracker must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import FailureConfig, Result
from drivetrain.plugin.checks import one_line
from drivetrain_testing.kits import (
    STEPS,
    assert_nothing_left,
    check_equal,
    check_hooks,
    check_overrides,
    check_pickling,
    make_trainer,
    run_two_workers,
)
from drivetrain_track._tracker import TrackerCallback, find_replaced_hooks

__all__ = ["TrackerConformance"]

_METHODS = ("open", "rewind", "log", "save", "log_failure", "close")
_END_S = 60.0
_SUPER = "A tracker that overrides a hook of Callback must call super()"


class TrackerConformance:
    """Tests of a tracker in real runs of two workers. Derive a class from it, and define :meth:`make_tracker`.

    Attributes:
        secret: a secret that :meth:`make_tracker` gives to the tracker, for example in its settings or in an
            environment variable; empty if the tracker has none. The test that needs it is then skipped.
    """

    secret: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.make_tracker is TrackerConformance.make_tracker:
            raise TypeError(f"{cls.__name__}: expected a method make_tracker(directory), got none")
        check_overrides(cls, TrackerConformance)

    def make_tracker(self, directory: Path) -> TrackerCallback:
        """Create the tracker.

        Args:
            directory: a directory for the data of the service. It is empty unless a run is resumed.
        """
        raise NotImplementedError

    def read_metrics(self, directory: Path, result: Result) -> Mapping[str, Sequence[tuple[int, Any]]]:
        """Return the metrics of all runs in the service: for each name, pairs of an iteration and a value.

        The names are those of the entries, such as ``eval/score``. Without this method, the tests that need it are
        skipped.

        Args:
            directory: the directory that was passed to :meth:`make_tracker`.
            result: the result of the run; its ``path`` is the run directory.
        """
        pytest.skip(f"{type(self).__name__} does not define read_metrics()")

    def read_status(self, directory: Path, result: Result) -> str:
        """Return the status that the service shows for the run: ``"finished"`` or ``"failed"``.

        Without this method, the test that needs it is skipped.

        Args:
            directory: the directory that was passed to :meth:`make_tracker`.
            result: the result of the run; its ``path`` is the run directory.
        """
        pytest.skip(f"{type(self).__name__} does not define read_status()")

    def test_is_created_without_a_run(self, tmp_path: Path) -> None:
        with assert_nothing_left(tmp_path / "temporary", of="the constructor"):
            tracker = self._make(tmp_path / "service")
        assert isinstance(tracker, TrackerCallback), (
            f"make_tracker(): expected a drivetrain_track.TrackerCallback, got {tracker!r}"
        )

    def test_hooks_are_spelled_correctly_and_accept_their_arguments(self, tmp_path: Path) -> None:
        tracker = self._make(tmp_path / "service")
        check_hooks(tracker)
        replaced = find_replaced_hooks(tracker)
        assert not replaced, "\n".join(replaced)

    def test_can_be_pickled_with_the_configuration_of_the_run(self, tmp_path: Path) -> None:
        check_pickling(self._make(tmp_path / "service"), "RunConfig(callbacks=...)")

    def test_methods_are_called_in_order_on_one_thread(self, tmp_path: Path) -> None:
        spy = _Spy(self._make(tmp_path / "service"))
        run_two_workers(tmp_path / "runs", failures=1, callbacks=[spy.tracker])
        spy.assert_no_problems()
        assert spy.calls[:1] == ["open"], f"expected open() to be called first, got {spy.calls}. {_SUPER}"
        assert spy.calls[-1:] == ["close"], f"expected close() to be called last, got {spy.calls}. {_SUPER}"
        assert spy.calls.count("log_failure") == 1, f"expected one call of log_failure(), got {spy.calls}. {_SUPER}"
        assert spy.iterations == sorted({*spy.iterations}), f"expected each iteration once, got {spy.iterations}"
        check_equal("the last iteration", spy.iterations[-1:], [STEPS])

    @pytest.mark.parametrize("method", ["open", "log", "close"])
    def test_service_that_is_unreachable_does_not_affect_the_run(self, tmp_path: Path, method: str) -> None:
        spy = _Spy(self._make(tmp_path / "service"))
        spy.make_unreachable(method)
        self._assert_unaffected(spy, tmp_path)

    @pytest.mark.parametrize("method", ["open", "log", "close"])
    def test_service_that_hangs_does_not_affect_the_run(self, tmp_path: Path, method: str) -> None:
        spy = _Spy(self._make(tmp_path / "service"))
        spy.tracker.drain_timeout_s = 0.2
        released = threading.Event()
        spy.before(method, lambda: released.wait(_END_S))
        try:
            self._assert_unaffected(spy, tmp_path)
        finally:
            released.set()
        assert spy.closed.wait(_END_S), f"expected close() to be called when the service responds again. {_SUPER}"

    def test_service_receives_each_metric(self, tmp_path: Path) -> None:
        spy = _Spy(self._make(tmp_path / "service"))
        result = run_two_workers(tmp_path / "runs", callbacks=[spy.tracker])
        spy.assert_no_problems()
        metrics = self.read_metrics(tmp_path / "service", result)
        last = {"loss": 1 / STEPS, "eval/score": 2.0 * STEPS, "eval/classes/first": 0.25, "array": 0.5}
        for name, expected in last.items():
            points = metrics.get(name, [])
            assert [iteration for iteration, _ in points] == list(range(1, STEPS + 1)), (
                f"{name}: expected a value for each of the iterations 1 to {STEPS}, got {list(points)}"
            )
            assert points[-1][1] == pytest.approx(expected, rel=1e-6), f"{name}: got {points}"
        for name in ("not_a_number", "infinite"):
            values = [value for _, value in metrics.get(name, [])]
            assert all(isinstance(value, float) for value in values), (
                f"{name}: expected floats, or no values if the service does not accept them, got {values}"
            )
            finite = [value for value in values if math.isfinite(value) and abs(value) < 1e30]
            assert not finite, f"{name}: expected {name.replace('_', ' ')} values, got {finite}"
        texts = {value for _, value in metrics.get("text", [])}
        assert texts <= {"in words"}, f"text: expected the text, or no values, got {texts}"

    def test_resumed_run_continues_the_same_run_of_the_service(self, tmp_path: Path) -> None:
        tracker = self._make(tmp_path / "service")
        make_trainer(tmp_path / "runs", failures=1, failure_config=FailureConfig(), callbacks=[tracker]).fit(
            raise_on_failure=False
        )
        spy = _Spy(self._make(tmp_path / "service"))
        result = run_two_workers(tmp_path / "runs", resume="must", callbacks=[spy.tracker])
        spy.assert_no_problems()
        steps = self.read_metrics(tmp_path / "service", result).get("step", [])
        assert sorted(steps) == [(step, step) for step in range(1, STEPS + 1)], (
            f"expected each iteration once after a resume, got the iterations and values {steps}. Find the run by "
            "run.id in open(), and return its last iteration"
        )

    def test_failed_run_is_marked_as_failed(self, tmp_path: Path) -> None:
        for failures, expected in ((0, "finished"), (1, "failed")):
            service = tmp_path / f"service_{failures}"
            trainer = make_trainer(
                tmp_path / f"runs_{failures}",
                failures=failures,
                failure_config=FailureConfig(),
                callbacks=[self._make(service)],
            )
            status = self.read_status(service, trainer.fit(raise_on_failure=False))
            assert status == expected, f"expected the status {expected!r} from the argument of close(), got {status!r}"

    def test_secret_is_not_in_the_run_directory_or_in_messages(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        if not self.secret:
            pytest.skip(f"{type(self).__name__} declares no secret")
        tracker = self._make(tmp_path / "service")
        result = run_two_workers(tmp_path / "runs", failures=1, callbacks=[tracker])
        for text, where in ((repr(tracker), "repr()"), *zip(capfd.readouterr(), ("stdout", "stderr"), strict=True)):
            assert self.secret not in text, f"the secret is in the tracker's {where}"
        files = [file for file in Path(result.path).rglob("*") if file.is_file()]
        found = sorted(file.name for file in files if self.secret.encode() in file.read_bytes())
        assert not found, f"the secret is in these files of the run directory: {', '.join(found)}"

    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        run_two_workers(tmp_path / "before", callbacks=[self._make(tmp_path / "service_before")])
        tracker = self._make(tmp_path / "service")
        with assert_nothing_left(tmp_path / "temporary", of=type(tracker).__name__):
            run_two_workers(tmp_path / "runs", failures=1, callbacks=[tracker])

    def _make(self, directory: Path) -> TrackerCallback:
        directory.mkdir(parents=True, exist_ok=True)
        return self.make_tracker(directory)

    def _assert_unaffected(self, spy: _Spy, directory: Path) -> None:
        result = run_two_workers(directory / "runs", callbacks=[spy.tracker])
        on_driver = [problem for problem in spy.problems if "thread" in problem]
        assert not on_driver, "; ".join(on_driver)
        check_equal("the last step", result.metrics["step"], STEPS)


class _Spy:
    """Records the calls of a tracker's methods, and what they raise. Created on the thread that runs the training."""

    def __init__(self, tracker: TrackerCallback) -> None:
        self.tracker = tracker
        self.calls: list[str] = []
        self.iterations: list[int] = []
        self.problems: list[str] = []
        self.closed = threading.Event()
        self._driver = threading.get_ident()
        for method in _METHODS:
            setattr(tracker, method, self._watched(method, getattr(tracker, method)))

    def before(self, method: str, function: Callable[[], Any]) -> None:
        """Call a function before a method of the tracker."""
        original = getattr(self.tracker, method)

        def call(*arguments: Any) -> Any:
            if threading.get_ident() != self._driver:
                function()
            return original(*arguments)

        setattr(self.tracker, method, call)

    def make_unreachable(self, method: str) -> None:
        """Make a method of the tracker raise an exception. ``close`` still releases the tracker's resources."""
        original = getattr(self.tracker, method)

        def call(*arguments: Any) -> Any:
            is_on_driver = threading.get_ident() == self._driver
            if is_on_driver or method == "close":
                original(*arguments)
            if not is_on_driver:
                raise ConnectionError("the conformance kit makes the service unreachable")

        setattr(self.tracker, method, call)

    def assert_no_problems(self) -> None:
        """Fail if a method has raised, or was called on a wrong thread."""
        assert not self.problems, f"{type(self.tracker).__qualname__}: {'; '.join(self.problems)}"

    def _watched(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == self._driver:
                self.problems.append(
                    f"{method}() was called on the driver's thread, which it blocks. Do not call it in a hook"
                )
                return None
            self.calls.append(method)
            if method == "log":
                self.iterations += [entry.iteration for entry in arguments[0]]
            if method == "rewind":
                self.iterations = [iteration for iteration in self.iterations if iteration <= arguments[0]]
            try:
                return original(*arguments)
            except BaseException as error:  # of the plugin, or of its service
                self.problems.append(f"{method}() raised {one_line(error)}")
                raise
            finally:
                if method == "close":
                    self.closed.set()

        return call
