"""Broken callbacks, each of which the conformance kit rejects with a message that names the mistake."""

import functools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drivetrain import Callback
from drivetrain_testing import CallbackConformance
from tests.kits.rejecting import rejection

CASES: list[Any] = []
processes: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time that threads and processes have to end, and end the processes that a callback has left."""
    monkeypatch.setattr("drivetrain_testing._cleanup._END_S", 0.5)
    yield
    while processes:
        processes[-1].kill()
        processes.pop().wait()


def rejected_by(test: str, *messages: str) -> Callable[[type[Any]], type[Any]]:
    """Register a class: the test of the kit must fail, with a message that contains the given ones."""

    def register(broken: type[Any]) -> type[Any]:
        CASES.append(pytest.param(broken, test, messages, id=broken.__name__))
        return broken

    return register


@rejected_by("test_leaves_the_metrics_unchanged", "expected to leave report.metrics unchanged", "'best': 1.0")
class AddsAMetric(Callback):
    def on_report(self, run: Any, report: Any) -> None:
        report.metrics["best"] = report.metrics["loss"]


@rejected_by("test_leaves_the_metrics_unchanged", "report.metrics unchanged")
class ChangesANestedMetric(Callback):
    def on_report(self, run: Any, report: Any) -> None:
        report.metrics["eval"].clear()


@rejected_by("test_hooks_are_spelled_correctly_and_accept_their_arguments", "on_checkpiont", "'on_checkpoint'")
class MisspellsAHook(Callback):
    def on_checkpiont(self, run: Any, checkpoint: Any) -> None: ...


@rejected_by(
    "test_hooks_are_spelled_correctly_and_accept_their_arguments",
    "ForgetsAnArgument.on_failure: expected the parameters (run, failure, retrying), got (run, failure)",
)
class ForgetsAnArgument(Callback):
    def on_failure(self, run: Any, failure: Any) -> None: ...  # type: ignore[override]


@rejected_by("test_is_created_without_a_run", "expected a drivetrain.Callback, got", "Derive the class from Callback")
class IsNoCallback:
    def on_report(self, run: Any, report: Any) -> None: ...


@rejected_by("test_leaves_nothing_behind", "LeaksAThread left the thread 'heartbeat' running")
class LeaksAThread(Callback):
    def on_run_start(self, run: Any) -> None:
        threading.Thread(target=threading.Event().wait, args=[20.0], name="heartbeat", daemon=True).start()


@rejected_by("test_leaves_nothing_behind", "LeaksAProcess left the process", "running: sleep 20")
class LeaksAProcess(Callback):
    def on_run_start(self, run: Any) -> None:
        processes.append(subprocess.Popen(["sleep", "20"]))


@rejected_by("test_leaves_nothing_behind", "LeaksAFile left temporary files: events-")
class LeaksAFile(Callback):
    def on_run_start(self, run: Any) -> None:
        os.close(tempfile.mkstemp(prefix="events-")[0])


@rejected_by("test_is_created_without_a_run", "the constructor left the thread 'sender' running")
class ConnectsInItsConstructor(Callback):
    def __init__(self) -> None:
        threading.Thread(target=threading.Event().wait, args=[20.0], name="sender", daemon=True).start()


@rejected_by("test_observes_a_run_that_is_retried", "RaisesAtTheEnd: on_run_end() raised LookupError: already closed")
class RaisesAtTheEnd(Callback):
    def on_run_end(self, run: Any, error: Any) -> None:
        raise LookupError("already closed")


@rejected_by("test_observes_a_run_that_fails", "on_failure() raised AttributeError")
class ExpectsARank(Callback):
    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        if not retrying:
            failure.worker.restart()


@rejected_by("test_observes_a_run_that_is_cancelled", "on_run_end() raised AttributeError")
class ExpectsAFailedTraining(Callback):
    def on_run_end(self, run: Any, error: Any) -> None:
        assert error is None or error.rank is not None


@rejected_by("test_observes_a_run_that_is_resumed", "on_resume() raised AttributeError")
class ResumesFromItsOwnState(Callback):
    def on_report(self, run: Any, report: Any) -> None:
        self.last = report

    def on_resume(self, run: Any, iteration: int) -> None:
        self.last = self.last[:iteration]


@rejected_by("test_one_object_observes_two_runs", "in the second run with the same object, on_run_start() raised")
class WorksOnce(Callback):
    started = False

    def on_run_start(self, run: Any) -> None:
        if self.started:
            raise RuntimeError("started twice")
        self.started = True


@rejected_by("test_can_be_pickled_with_the_configuration_of_the_run", "expected an object that can be pickled, got")
class HoldsALock(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@rejected_by("test_a_report_costs_the_same_throughout_a_long_run", "expected the same number of function calls")
class KeepsAllReports(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_report(self, run: Any, report: Any) -> None:
        self.losses.append(report.metrics["loss"])
        self.mean = functools.reduce(lambda total, loss: total + loss, self.losses) / len(self.losses)


@rejected_by("test_a_report_costs_the_same_throughout_a_long_run", "expected to return at once, got {'sleep': 100}")
class Sleeps(Callback):
    def on_report(self, run: Any, report: Any) -> None:
        time.sleep(0.0001)


@pytest.mark.parametrize(("broken", "test", "messages"), CASES)
def test_broken_callback_is_rejected(
    request: pytest.FixtureRequest, broken: type[Callback], test: str, messages: tuple[str, ...]
) -> None:
    message = rejection(request, CallbackConformance, test, make_callback=broken)
    assert [text for text in messages if text not in message] == [], message


def test_class_without_a_callback_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an attribute `name`, or a method make_callback"):
        type("TestNothing", (CallbackConformance,), {})
