"""A small tracker that passes the conformance kit, and broken ones, which it rejects with the name of the mistake."""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Result
from drivetrain_track import TrackerCallback
from drivetrain_track.testing import TrackerConformance
from tests.kits.rejecting import rejection

SECRET = "s3cr3t-0123456789"
CASES: list[Any] = []


class Lines(TrackerCallback):
    """Writes the reports of each run to a file of JSON lines."""

    def __init__(self, directory: Path, token: str = "") -> None:
        super().__init__()
        self.directory = directory
        self._token = token

    def open(self, run: Any) -> int | None:
        self.directory.mkdir(exist_ok=True)
        self._file = self.directory / self.name_of(run)
        if not self._file.exists():
            self._file.touch()
            return None
        return max((json.loads(line)["iteration"] for line in self._file.read_text().splitlines()), default=0)

    def name_of(self, run: Any) -> str:
        return str(run.id)

    def log(self, entries: Any) -> None:
        with self._file.open("a") as file:
            for entry in entries:
                file.write(self.line(entry.iteration, entry.metrics) + "\n")

    def line(self, iteration: int, metrics: Mapping[str, Any]) -> str:
        return json.dumps({"iteration": iteration, **metrics})

    def close(self, error: BaseException | None) -> None:
        status = self.directory / f"{self._file.name}.status"
        status.write_text("failed" if error else "finished")


def read_metrics(directory: Path, result: Result) -> dict[str, list[tuple[int, Any]]]:
    points = defaultdict(list)
    for file in directory.iterdir():
        for line in file.read_text().splitlines() if not file.suffix else []:
            values = json.loads(line)
            for name, value in values.items():
                points[name].append((values["iteration"], value))
    return points


def read_status(directory: Path, result: Result) -> str:
    (file,) = directory.glob("*.status")
    return file.read_text()


class TestLines(TrackerConformance):
    secret = SECRET

    def make_tracker(self, directory: Path) -> TrackerCallback:
        return Lines(directory, SECRET)

    def read_metrics(self, directory: Path, result: Result) -> dict[str, list[tuple[int, Any]]]:
        return read_metrics(directory, result)

    def read_status(self, directory: Path, result: Result) -> str:
        return read_status(directory, result)


def rejected_by(test: str, message: str, **parameters: Any) -> Callable[[type[Any]], type[Any]]:
    """Register a class: the test of the kit must fail with a message that contains the given one."""

    def register(broken: type[Any]) -> type[Any]:
        CASES.append(pytest.param(broken, test, parameters, message, id=broken.__name__))
        return broken

    return register


@rejected_by("test_methods_are_called_in_order_on_one_thread", "expected close() to be called last")
class NeverCloses(Lines):
    def on_run_end(self, run: Any, error: Any) -> None:
        feed = self._feed
        feed.finish = lambda *arguments: None  # type: ignore[union-attr, method-assign]


@rejected_by("test_methods_are_called_in_order_on_one_thread", "expected one call of log_failure()")
class IgnoresFailures(Lines):
    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None: ...


@rejected_by("test_hooks_are_spelled_correctly_and_accept_their_arguments", "Did you mean log_failure()?")
class MisspellsAMethod(Lines):
    def log_failures(self, failure: Any, retrying: bool) -> None: ...


@rejected_by("test_hooks_are_spelled_correctly_and_accept_their_arguments", "log: expected the parameters (entries)")
class TakesOneEntry(Lines):
    def log(self, iteration: int, metrics: Any) -> None: ...


@rejected_by("test_hooks_are_spelled_correctly_and_accept_their_arguments", "Call super().on_report(...) in it")
class ReplacesTheHook(Lines):
    def on_report(self, run: Any, report: Any) -> None:
        print(report.metrics)


class WithoutLog(TrackerCallback):
    def __init__(self, directory: Path, token: str = "") -> None:
        super().__init__()

    def open(self, run: Any) -> None: ...


CASES.append(pytest.param(WithoutLog, "test_is_created_without_a_run", {}, "abstract method", id="WithoutLog"))


@rejected_by("test_service_that_hangs_does_not_affect_the_run", "log() was called on the driver's thread", method="log")
class LogsInTheHook(Lines):
    def on_report(self, run: Any, report: Any) -> None:
        self.log([report])


@rejected_by("test_service_that_is_unreachable_does_not_affect_the_run", "on_run_start() raised", method="open")
class ConnectsInTheHook(Lines):
    def on_run_start(self, run: Any) -> None:
        raise ConnectionError("no route to host")


@rejected_by("test_service_receives_each_metric", "not_a_number: expected floats, or no values")
class LogsNumbersAsText(Lines):
    def line(self, iteration: int, metrics: Mapping[str, Any]) -> str:
        texts = {name: str(value) if value != value else value for name, value in metrics.items()}
        return super().line(iteration, texts)


@rejected_by("test_service_receives_each_metric", "not_a_number: expected not a number values, got [0.0")
class LogsZeroInstead(Lines):
    def line(self, iteration: int, metrics: Mapping[str, Any]) -> str:
        return super().line(iteration, {name: value if value == value else 0.0 for name, value in metrics.items()})


@rejected_by("test_service_receives_each_metric", "LogsStrictJson: log() raised ValueError")
class LogsStrictJson(Lines):
    def line(self, iteration: int, metrics: Mapping[str, Any]) -> str:
        return json.dumps({"iteration": iteration, **metrics}, allow_nan=False)


@rejected_by("test_service_receives_each_metric", "eval/score: expected a value for each of the iterations 1 to 6")
class OmitsNestedMetrics(Lines):
    def line(self, iteration: int, metrics: Mapping[str, Any]) -> str:
        return super().line(iteration, {name: value for name, value in metrics.items() if "/" not in name})


@rejected_by("test_resumed_run_continues_the_same_run_of_the_service", "Find the run by run.id in open()")
class OpensANewRun(Lines):
    def name_of(self, run: Any) -> str:
        return f"{run.id}-{len(list(self.directory.iterdir()))}"


@rejected_by("test_failed_run_is_marked_as_failed", "expected the status 'failed' from the argument of close()")
class AlwaysFinished(Lines):
    def close(self, error: BaseException | None) -> None:
        super().close(None)


@rejected_by("test_secret_is_not_in_the_run_directory_or_in_messages", "files of the run directory: settings.json")
class WritesItsSettings(Lines):
    def open(self, run: Any) -> int | None:
        (run.path / "settings.json").write_text(json.dumps({"token": self._token}))
        return super().open(run)


@rejected_by("test_secret_is_not_in_the_run_directory_or_in_messages", "the secret is in the tracker's repr()")
class ShowsItsToken(Lines):
    def __repr__(self) -> str:
        return f"ShowsItsToken({self._token!r})"


@rejected_by("test_leaves_nothing_behind", "LeaksAThread left the thread 'upload' running")
class LeaksAThread(Lines):
    def close(self, error: BaseException | None) -> None:
        threading.Thread(target=threading.Event().wait, args=[20.0], name="upload", daemon=True).start()


@rejected_by("test_can_be_pickled_with_the_configuration_of_the_run", "expected an object that can be pickled, got")
class HoldsItsClient(Lines):
    def __init__(self, directory: Path, token: str = "") -> None:
        super().__init__(directory, token)
        self.client = threading.Lock()


@pytest.mark.parametrize(("broken", "test", "parameters", "message"), CASES)
def test_broken_tracker_is_rejected(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    broken: type[Lines],
    test: str,
    parameters: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("drivetrain_testing._cleanup._END_S", 0.5)
    methods = {"read_metrics": read_metrics, "read_status": read_status, "secret": SECRET}
    found = rejection(
        request,
        TrackerConformance,
        test,
        parameters,
        make_tracker=lambda directory: broken(directory, SECRET),
        **methods,
    )
    assert message in found


def test_class_without_a_tracker_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a method make_tracker\(directory\), got none"):
        type("TestNothing", (TrackerConformance,), {})
