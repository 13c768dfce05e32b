"""Rules for every tracker: its failures and delays never stop or block a run, and it receives every report."""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    PluginBrokenError,
    PluginNotFoundError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain._driver.callbacks import make_callbacks
from drivetrain.loggers import CSVLoggerCallback, JsonLoggerCallback
from drivetrain_console import ProgressCallback
from drivetrain_track import Entry, TrackerCallback
from tests.core.conftest import Install
from tests.support import Pipe, wait_for_release

REPORTS = 5
HANG_S = 30.0


class Notes(TrackerCallback):
    """A tracker that records its calls, and raises, waits or ends its thread in the call that the test chooses."""

    title = "notes"

    def __init__(self, *, fault: str = "", raises: type[BaseException] = OSError, times: int = 1000, **options: Any):
        super().__init__(**options)
        self.fault, self.raises, self.times = fault, raises, times
        self.calls: list[str] = []
        self.entries: list[Entry] = []
        self.saved: dict[str, list[str]] = {}

    @property
    def wants_checkpoints(self) -> bool:
        return True

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fault == call and self.times > 0:
            self.times -= 1
            raise self.raises("requested by the test")
        if self.fault == f"hang in {call}":
            threading.Event().wait(HANG_S)

    def open(self, run: Any) -> None:
        self._note("open")

    def log(self, entries: Any) -> None:
        self._note("log")
        self.entries += entries

    def save(self, checkpoint: Any, directory: str) -> None:
        self._note("save")
        self.saved[checkpoint.name] = sorted(os.listdir(directory))

    def log_failure(self, failure: Any, retrying: bool) -> None:
        self._note(f"failure {type(failure.exception).__name__} {retrying}")

    def close(self, error: BaseException | None) -> None:
        self._note(f"close {type(error).__name__}" if error else "close")


def report_steps() -> None:
    rank = drivetrain.get_context().get_world_rank()
    for step in range(REPORTS):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"{rank}.txt").write_text(str(step))
            checkpoint = Checkpoint(directory) if step == 2 else None
            drivetrain.report({"loss": step + rank / 10, "eval": {"score": 2 * step}}, checkpoint=checkpoint)


def fit(
    tmp_path: Path, *callbacks: Callback | str, workers: int = 0, train: Any = report_steps, **options: Any
) -> Result:
    run_config = RunConfig(**{"name": "run", "storage_path": tmp_path, "callbacks": callbacks, "verbose": 0, **options})
    return DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=workers), run_config=run_config).fit()


def test_tracker_gets_every_report_in_order_and_every_checkpoint(tmp_path: Path) -> None:
    notes = Notes()
    fit(tmp_path, notes)

    assert [entry.iteration for entry in notes.entries] == list(range(1, REPORTS + 1))
    assert notes.entries[3].metrics["loss"] == 3
    assert notes.entries[3].metrics["eval/score"] == 6
    assert notes.entries[3].metrics["training_iteration"] == 4
    assert not [name for name in notes.entries[3].metrics if name.startswith("_")]
    assert notes.saved == {"checkpoint_000003": [".checkpoint.json", "0.txt"]}
    assert (notes.calls[0], notes.calls[-1]) == ("open", "close")


@pytest.mark.parametrize("raises", [OSError, SystemExit])
@pytest.mark.parametrize("call", ["open", "log", "save", "close"])
def test_tracker_that_raises_warns_once_and_the_run_continues(
    call: str, raises: type[BaseException], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = Notes(fault=call, raises=raises)
    result = fit(tmp_path, notes)

    assert result.metrics["loss"] == REPORTS - 1
    first, *others = capfd.readouterr().err.splitlines()
    assert first == (
        f"run: notes: {raises.__name__}: requested by the test; the run continues, and the tracker is retried"
    )
    missing = [f"run: notes: {REPORTS} of {REPORTS} reports were not logged"] if call in ("open", "log") else []
    assert others == missing
    assert len(result.metrics_dataframe) == REPORTS


def test_tracker_that_fails_temporarily_gets_all_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notes = Notes(fault="log", times=2)
    fit(tmp_path, notes)

    losses = [(entry.iteration, entry.metrics["loss"]) for entry in notes.entries if "loss" in entry.metrics]
    assert losses == [(step + 1, step) for step in range(REPORTS)]
    assert len(capfd.readouterr().err.splitlines()) <= 1


class Strict(Notes):
    """A service that refuses a whole request because of one value, or because of one name."""

    def log(self, entries: Any) -> None:
        for entry in entries:
            for name, value in entry.metrics.items():
                if "//" in name or value == "refused":
                    raise ValueError(f"invalid {name}")
        super().log(entries)


@pytest.mark.parametrize("together", [True, False])
def test_refused_value_costs_only_that_value_with_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], together: bool
) -> None:
    def train() -> None:
        for step in range(1, 8):
            refused = {"a//b": step} if step > 2 else {}
            drivetrain.report({"loss": step, **refused, "text": "refused" if step == 4 and together else "accepted"})

    tracker = Strict()
    fit(tmp_path, tracker, train=train)

    values: dict[str, list[tuple[int, Any]]] = {}
    for entry in tracker.entries:
        for name, value in entry.metrics.items():
            values.setdefault(name, []).append((entry.iteration, value))
    steps = range(1, 8)
    assert values["loss"] == values["training_iteration"] == [(step, step) for step in steps]
    assert values["text"] == [(step, "accepted") for step in steps if step != 4 or not together]
    assert "a//b" not in values
    lines = [line for line in capfd.readouterr().err.splitlines() if "notes:" in line]
    assert "refused the value of 'a//b' (ValueError: invalid a//b); other values are logged" in lines[0]
    assert lines[1:] == (["run: notes: values of these metrics were refused: 'a//b', 'text'"] if together else [])


@pytest.mark.parametrize("call", ["open", "log", "save", "close"])
def test_hanging_tracker_delays_no_report_and_the_end_only_up_to_its_limit(
    call: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = Notes(fault=f"hang in {call}", drain_timeout_s=0.2)
    began = time.monotonic()
    result = fit(tmp_path, notes)

    assert time.monotonic() - began < HANG_S
    assert len(result.metrics_dataframe) == REPORTS
    assert "run: notes: not finished 0.2 s after the end of the run" in capfd.readouterr().err


def test_tracker_that_falls_behind_drops_reports_beyond_its_capacity(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain_track._tracker._MAX_QUEUED", 2)
    notes = Notes(fault="hang in open", drain_timeout_s=0.1)
    fit(tmp_path, notes)

    assert f"run: notes: {REPORTS} of {REPORTS} reports were not logged" in capfd.readouterr().err


def test_full_disk_does_not_stop_a_run_whose_tracker_writes_to_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class ToFullDisk(Notes):
        def log(self, entries: Any) -> None:
            with open("/dev/full", "w") as file:
                file.write("no room")

    result = fit(tmp_path, ToFullDisk())

    assert len(result.metrics_dataframe) == REPORTS
    assert "OSError: [Errno 28] No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ("rank0", [{"loss": 0.0}, {"loss": 1.0}]),
        ("all", [{"loss": 0.0}, {"loss": 1.0}, {"rank_1/loss": 0.1}, {"rank_1/loss": 1.1}]),
        ("reduced", [{"loss": 0.05}, {"loss": 1.05}]),
    ],
)
def test_tracker_gets_reports_of_rank_0_of_all_ranks_or_their_mean(
    ranks: Any, expected: list[dict[str, float]], tmp_path: Path
) -> None:
    notes = Notes(ranks=ranks)
    fit(tmp_path, notes, workers=2)

    reported = sorted(
        ({name: value for name, value in entry.metrics.items() if name.endswith("loss")} for entry in notes.entries),
        key=lambda metrics: [*metrics.items()],
    )
    assert [metrics for metrics in reported if min(metrics.values()) < 1.5] == [pytest.approx(e) for e in expected]


def test_mean_does_not_wait_for_ranks_that_never_report(tmp_path: Path) -> None:
    gate = Pipe(tmp_path / "gate")
    path = gate.path

    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        if rank == 0:
            wait_for_release(path)
        for step in range(3 if rank else 1100):
            drivetrain.report({"loss": step + rank})

    class ReleaseRank0(Callback):
        def on_report(self, run: Any, report: Any) -> None:
            if (report.rank, report.iteration) == (1, 3):
                gate.release()

    notes = Notes(ranks="reduced")
    fit(tmp_path, notes, ReleaseRank0(), workers=2, train=train)

    losses = {entry.iteration: entry.metrics["loss"] for entry in notes.entries}
    assert list(losses) == list(range(1, 1101))
    assert (losses[3], losses[4]) == (2.5, 3)
    gate.close()


def fail_once_after_a_checkpoint() -> None:
    """Commit step 3, report up to step 5, fail; the second attempt resumes with step 4."""
    start = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "step.txt").read_text())
    for step in range(start + 1, 8):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step.txt").write_text(str(step))
            attempt = drivetrain.get_context().attempt
            metrics = {"step": step, "attempt": attempt}
            drivetrain.report(metrics, checkpoint=Checkpoint(directory) if step == 3 else None)
        if step == 5 and not start:
            raise ArithmeticError


def test_repeated_reports_after_a_failure_are_tracked_once(tmp_path: Path) -> None:
    notes = Notes()
    fit(tmp_path, notes, train=fail_once_after_a_checkpoint, failure_config=FailureConfig(max_failures=1))

    reported = [(entry.metrics["step"], entry.metrics["attempt"]) for entry in notes.entries]
    assert reported == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1), (7, 1)]
    assert [call for call in notes.calls if call.startswith("failure")] == ["failure ArithmeticError True"]


def test_tracker_is_notified_of_the_outcome(tmp_path: Path) -> None:
    def fail() -> None:
        raise ArithmeticError

    notes = Notes()
    with pytest.raises(TrainingFailedError):
        fit(tmp_path, notes, train=fail)
    assert notes.calls == ["open", "failure ArithmeticError False", "close TrainingFailedError"]


def test_callback_replaces_the_default_callback_of_the_same_class(tmp_path: Path) -> None:
    def kinds(*callbacks: Callback | str, verbose: int = 1) -> list[str]:
        made = [type(one).__name__ for one in make_callbacks(RunConfig(callbacks=callbacks, verbose=verbose))]
        return [name for name in made if name in usual]

    usual = ["JsonLoggerCallback", "CSVLoggerCallback", "ProgressCallback"]
    assert kinds() == usual
    assert kinds(verbose=0) == usual[:2]
    assert kinds(ProgressCallback(total={"step": 3}), verbose=0) == usual
    assert sorted(kinds("json", CSVLoggerCallback(), "progress")) == sorted(usual)

    fit(tmp_path, JsonLoggerCallback())
    assert len((tmp_path / "run" / "result.json").read_text().splitlines()) == REPORTS


def test_unknown_callback_name_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(PluginNotFoundError, match=r"no callback 'mlfow' is installed\. Installed: .*'json'"):
        fit(tmp_path, "mlfow")
    assert not (tmp_path / "run").exists()


def test_tracker_without_its_package_names_the_package_before_the_start() -> None:
    class Missing(Notes):
        package = "no_such_tracker"
        extra = "tracker"

    with pytest.raises(PluginNotFoundError, match=r'no_such_tracker, which is not.*"drivetrain\[tracker\]"'):
        Missing()


def test_callback_with_required_arguments_needs_options(install: Install) -> None:
    source = (
        "from drivetrain import Callback\n"
        "class NeedsArguments(Callback):\n"
        "    def __init__(self, where): self.where = where\n"
    )
    install("needy-plugin", "needy_plugin", source, {"drivetrain.callbacks": {"needy": "needy_plugin:NeedsArguments"}})
    with pytest.raises(PluginBrokenError, match=r"as in \('needy', .*, or an object: .*NeedsArguments\("):
        make_callbacks(RunConfig(callbacks=["needy"]))
    assert make_callbacks(RunConfig(callbacks=[("needy", {"where": "here"})]))


@pytest.mark.parametrize("wrong", [{"ranks": "rank1"}, {"drain_timeout_s": -1}])
def test_arguments_of_a_tracker_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Notes(**wrong)
