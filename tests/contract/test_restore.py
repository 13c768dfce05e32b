import contextlib
import csv
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    CheckpointConfig,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    RunExistsError,
    RunInUseError,
    SerializationError,
    StorageError,
    TrainingFailedError,
)
from drivetrain._storage.layout import TIMELINE_FILE, USAGE_FILE
from drivetrain.plugin import Report
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import in_this_process, same_on_ray
from tests.contract.test_checkpoints import committed_names, directories, files_of, report_files
from tests.support import (
    Driver,
    Pipe,
    read_lines,
    release,
    send_line,
    snapshot,
    wait_for_release,
    wait_until_exited,
)

on_one_machine = pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
"""The contents of a run directory for the next driver, which do not depend on the runtime."""


def count_up(config: dict) -> list[int]:
    """Resume from the checkpoint; report every step, and every second one with a checkpoint.

    The config may make it wait at a step, or fail there as soon as all earlier reports have been processed, which rank
    0 does. If a file ``marker`` exists, it continues.
    """
    rank = drivetrain.get_context().get_world_rank()
    start = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            start = int(Path(path, "0.txt").read_text())
    if "pipe" in config:
        send_line(config["pipe"], f"pid {os.getpid()}")
    done = []
    for step in range(start, config["steps"]):
        if step == config.get("fail_at") and not os.path.exists(config.get("marker", "")):
            if rank > 0:
                signal.pause()  # until the group is terminated
            if done:
                wait_for_release(config["taken"])
            raise RuntimeError(f"failed at step {step}")
        if step == config.get("wait_at"):
            send_line(config["pipe"], f"waits at {step}")
            wait_for_release(config["gate"])
        if step % 2 == 1:
            report_files({"step": step}, {f"{rank}.txt": str(step + 1)})
        else:
            drivetrain.report({"step": step})
        done.append(step)
    return done


class LetsFail(Callback):
    """Lets rank 0 of :func:`count_up` fail once every rank's report of the previous step has been processed."""

    def __init__(self, taken: str, step: int, world: int) -> None:
        self._taken = taken
        self._step = step
        self._world = world
        self._ranks: set[int] = set()

    def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
        self._ranks.clear()

    def on_report(self, run: Any, report: Report) -> None:
        if report.metrics["step"] == self._step - 1:
            self._ranks.add(report.rank)
            if len(self._ranks) == self._world:
                release(self._taken)


def assert_metrics_have_no_gap_and_no_duplicate(run: Path | str, *, steps: int, world: int) -> None:
    """Check that every rank's file has every step once, in order, and so does the table of rank 0."""
    for name in ["result.json", *(f"result_rank_{rank}.json" for rank in range(1, world))]:
        lines = read_lines(Path(run, name))
        assert [line["step"] for line in lines] == list(range(steps)), name
        assert [line["_training_iteration"] for line in lines] == list(range(1, steps + 1)), name
    with Path(run, "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), int(row["_training_iteration"])) for row in rows] == [
        (step, step + 1) for step in range(steps)
    ]


def lines_about_resuming(text: str) -> list[str]:
    return [line for line in text.splitlines() if "resume=" in line]


def fit_until_it_fails(
    runtime: RuntimeUnderTest, taken: Pipe, function: Callable[[dict], Any], config: dict, **options: Any
) -> drivetrain.Result:
    """Run a function that calls :func:`count_up` with this config."""
    callback = LetsFail(taken.path, config["fail_at"], runtime.world())
    return runtime.fit(function, {**config, "taken": taken.path}, callbacks=[callback], **options)


def fail(runtime: RuntimeUnderTest, taken: Pipe, config: dict, **options: Any) -> Path:
    """Make a run fail, and return its directory."""
    with pytest.raises(TrainingFailedError):
        fit_until_it_fails(runtime, taken, count_up, config, **options)
    return runtime.storage_path / "run"


@same_on_ray
def test_restored_trainer_resumes_with_its_original_arguments(
    runtime: RuntimeUnderTest, gate: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "fixed"
    config = {"steps": 8, "fail_at": 5, "marker": str(marker)}
    rules = CheckpointConfig(num_to_keep=2)
    run = fail(runtime, gate, config, metadata={"dataset": "digits"}, verbose=1, checkpoint_config=rules)
    marker.touch()
    capfd.readouterr()

    result = DataParallelTrainer.restore(run).fit()

    assert result.return_value == [4, 5, 6, 7]
    assert result.path == str(run)
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=8, world=runtime.world())
    assert committed_names(result.path) == directories(result.path) == ["checkpoint_000006", "checkpoint_000008"]
    assert files_of(result.checkpoint) == {f"{rank}.txt": "8" for rank in range(runtime.world())}
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"dataset": "digits"}
    (output,) = lines_about_resuming(capfd.readouterr().err)
    assert f"resume='{run}', found {run}, continues from checkpoint_000004" in output


@on_one_machine
def test_restored_trainer_accepts_a_new_function_configs_metadata_and_number_of_workers(
    runtime: RuntimeUnderTest, gate: Pipe, tmp_path: Path
) -> None:
    run = fail(runtime, gate, {"steps": 8, "fail_at": 5}, metadata={"owner": "the first"})

    def doubled(config: dict) -> tuple[list[int], int, dict]:
        context = drivetrain.get_context()
        return count_up(config), context.get_world_size(), context.get_metadata()

    restored = DataParallelTrainer.restore(
        str(run),
        doubled,
        train_loop_config={"steps": 10},
        scaling_config=runtime.scaling(3),
        run_config=RunConfig(name="ignored", verbose=0, checkpoint_config=CheckpointConfig(num_to_keep=1)),
        metadata={"owner": "the second"},
    )
    result = restored.fit()

    assert result.return_value == ([4, 5, 6, 7, 8, 9], runtime.world(3), {"owner": "the second"})
    assert result.path == str(run)
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=10, world=runtime.world())
    assert len(committed_names(result.path)) == 1
    assert not (tmp_path / "ignored").exists()
    if runtime.has_processes:
        assert [line["step"] for line in read_lines(run / "result_rank_2.json")] == [4, 5, 6, 7, 8, 9]


@on_one_machine
def test_can_restore_detects_runs_that_can_be_restored(runtime: RuntimeUnderTest, gate: Pipe, tmp_path: Path) -> None:
    failed = fail(runtime, gate, {"steps": 4, "fail_at": 2})
    finished = runtime.fit(count_up, {"steps": 2}, name="finished")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")

    can = DataParallelTrainer.can_restore
    assert can(failed)
    assert can(f"{finished.path}/")
    assert not can(tmp_path / "missing")
    assert not can(tmp_path / "empty")
    assert not can(tmp_path / "file")
    assert finished.checkpoint is not None
    assert not can(finished.checkpoint.path)
    for path in ("missing", "empty", "file", "finished/checkpoint_000002"):
        with pytest.raises(StorageError, match=r"expected a run directory with run\.json and trainer\.pkl, got"):
            DataParallelTrainer.restore(tmp_path / path)


@in_this_process
def test_path_of_a_run_may_be_relative_or_start_with_the_home_directory(
    runtime: RuntimeUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runtime.fit(count_up, {"steps": 2})

    for steps, path in enumerate(("run", "./run/", "~/run", Path("run"), f"file://{tmp_path}/run"), 3):
        assert DataParallelTrainer.can_restore(path)
        assert Result.from_path(path).path == str(tmp_path / "run")
        result = DataParallelTrainer.restore(path, train_loop_config={"steps": steps}).fit()
        assert result.path == str(tmp_path / "run")
    assert_metrics_have_no_gap_and_no_duplicate(tmp_path / "run", steps=7, world=1)


@in_this_process
def test_argument_that_can_no_longer_be_loaded_is_named_and_can_be_passed_again(
    runtime: RuntimeUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "here_for_now.py"
    module.write_text("class Setting:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    here_for_now = importlib.import_module("here_for_now")
    run = runtime.fit(count_up, {"steps": 2, "setting": here_for_now.Setting()}).path
    module.unlink()
    monkeypatch.delitem(sys.modules, "here_for_now")
    importlib.invalidate_caches()

    with pytest.raises(SerializationError, match=r"train_loop_config cannot be loaded \(ModuleNotFound.*Pass it again"):
        DataParallelTrainer.restore(run)
    with pytest.raises(SerializationError, match=r"stored train_loop_config cannot be loaded"):
        DataParallelTrainer.restore(run, count_up)
    assert DataParallelTrainer.restore(run, train_loop_config={"steps": 4}).fit().return_value == [2, 3]


@in_this_process
def test_damaged_trainer_file_is_named(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    runtime.fit(count_up, {"steps": 2})
    (tmp_path / "run" / "trainer.pkl").write_bytes(b"\x80\x05 nothing like it")

    with pytest.raises(StorageError, match=r"run/trainer\.pkl cannot be read"):
        DataParallelTrainer.restore(tmp_path / "run")
    assert runtime.fit(count_up, {"steps": 4}, resume="must").return_value == [2, 3]


@pytest.mark.parametrize("given", ["a string", "a path"])
@on_one_machine
def test_run_is_resumed_by_its_path(runtime: RuntimeUnderTest, gate: Pipe, given: str) -> None:
    run = fail(runtime, gate, {"steps": 6, "fail_at": 3})

    result = runtime.fit(
        count_up, {"steps": 6}, name=None, storage_path=None, resume=str(run) if given == "a string" else run
    )

    assert result.return_value == [2, 3, 4, 5]
    assert result.path == str(run)
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=6, world=runtime.world())


@in_this_process
def test_path_that_is_not_a_run_is_refused_and_nothing_is_created_there(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    run = Path(runtime.fit(count_up, {"steps": 2}).path)
    before = snapshot(run)

    def resume(path: Path) -> None:
        runtime.fit(count_up, {"steps": 4}, name=None, storage_path=None, resume=path)

    with pytest.raises(StorageError, match=r"got the checkpoint .*checkpoint_000002. Pass the directory above it"):
        resume(run / "checkpoint_000002")
    for path in (run / "artifacts", tmp_path / "missing", tmp_path):
        with pytest.raises(StorageError, match=rf"expected a run directory with a run\.json, got {path}$"):
            resume(path)
    assert not (tmp_path / "missing").exists()
    assert snapshot(run) == before
    for wrong in ({"resume": run, "name": None}, {"resume": run, "storage_path": None}, {"resume": "run"}):
        with pytest.raises(ConfigurationError, match=r"RunConfig\(resume="):
            runtime.fit(count_up, {"steps": 4}, **wrong)


@on_one_machine
def test_metrics_of_all_ranks_continue_without_gap_or_duplicate_after_a_retry(
    runtime: RuntimeUnderTest, gate: Pipe, tmp_path: Path
) -> None:
    def train(config: dict) -> list[int]:
        return count_up(config if drivetrain.get_context().attempt < 2 else {"steps": 13})

    result = fit_until_it_fails(
        runtime, gate, train, {"steps": 13, "fail_at": 11}, failure_config=FailureConfig(max_failures=2)
    )

    assert result.return_value == [10, 11, 12]
    assert_metrics_have_no_gap_and_no_duplicate(result.path, steps=13, world=runtime.world())


DRIVER = """
import json, sys
from drivetrain import Callback, DataParallelTrainer, RunConfig, ScalingConfig
from tests.contract.test_restore import count_up
from tests.support import send_line

given = json.loads(sys.argv[1])

class NotifyReports(Callback):
    # The loggers run before it, and everything before a rank's report has been committed earlier.
    def on_report(self, run, report):
        if report.metrics["step"] == given["config"]["wait_at"] - 1:
            send_line(given["config"]["pipe"], f"processed report of rank {report.rank}")

if __name__ == "__main__":
    DataParallelTrainer(
        count_up,
        train_loop_config=given["config"],
        scaling_config=ScalingConfig(num_workers=given["num_workers"], runtime=given["runtime"]),
        run_config=RunConfig(name="run", storage_path=given["storage_path"], verbose=0, callbacks=[NotifyReports()]),
    ).fit()
"""


def start_and_wait_until_it_waits(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe, *, wait_at: int
) -> tuple[Driver, list[int]]:
    """Start a driver, and return it and its workers' pids once every report before the step is written.

    That step comes after one without a checkpoint.
    """
    driver = runtime.start_driver(
        DRIVER, {"config": {"steps": 100, "wait_at": wait_at, "pipe": pipe.path, "gate": gate.path}}
    )
    lines = pipe.receive(3 * runtime.world())
    return driver, [int(line.removeprefix("pid ")) for line in lines if line.startswith("pid ")]


def kill_together(driver: Driver, workers: list[int]) -> None:
    """Send SIGKILL to the driver, its workers, and every other process that it started."""
    pids = [driver.process.pid, *workers, *driver.offspring()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.process.wait()
    wait_until_exited(pids)


def leave_unchanged(run: Path) -> None:
    """Leave the metrics unchanged."""


def cut_the_last_lines(run: Path) -> None:
    """Simulate a partial last write: the last number lacks its last digit."""
    for file in run.glob("result*.json"):
        os.truncate(file, file.stat().st_size - 3)
    os.truncate(run / "progress.csv", (run / "progress.csv").stat().st_size - 2)


def begin_another_line(run: Path) -> None:
    """Simulate the partial write of a further line."""
    for file in [*run.glob("result*.json"), run / "progress.csv"]:
        with file.open("a") as lines:
            lines.write('{"step": 13, "_timest' if file.suffix == ".json" else "13,17")


def test_run_whose_driver_and_workers_were_killed_together_resumes_from_the_latest_commit(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    kill_together(*start_and_wait_until_it_waits(runtime, pipe, gate, wait_at=5))
    killed = Result.from_path(runtime.storage_path / "run")
    assert killed.error is None
    assert files_of(killed.checkpoint) == {f"{rank}.txt": "4" for rank in range(runtime.world())}

    result = runtime.fit(count_up, {"steps": 8}, resume="must")

    assert result.return_value == [4, 5, 6, 7]
    assert_metrics_have_no_gap_and_no_duplicate(result.path, steps=8, world=runtime.world())
    assert directories(result.path) == committed_names(result.path)


@pytest.mark.parametrize("damage", [cut_the_last_lines, begin_another_line])
@on_one_machine
def test_partial_metrics_line_of_a_killed_driver_is_dropped(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe, damage: Callable[[Path], None]
) -> None:
    kill_together(*start_and_wait_until_it_waits(runtime, pipe, gate, wait_at=13))
    run = runtime.storage_path / "run"
    damage(run)
    metrics = Result.from_path(run).metrics
    assert metrics["step"] == (11 if damage is cut_the_last_lines else 12)

    result = DataParallelTrainer.restore(run, train_loop_config={"steps": 15}).fit()

    assert result.return_value == [12, 13, 14]
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=15, world=runtime.world())


def test_second_driver_is_refused_with_the_holder_named_and_gets_the_run_once_the_holder_is_killed(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    driver, _ = start_and_wait_until_it_waits(runtime, pipe, gate, wait_at=3)
    run = runtime.storage_path / "run"
    records = (TIMELINE_FILE, USAGE_FILE)  # the first driver continues to write these

    def others() -> dict[str, tuple[int, bytes]]:
        return {name: state for name, state in snapshot(run).items() if name not in records}

    before = others()

    holder = rf"process {driver.process.pid} on {socket.gethostname()} "
    with pytest.raises(RunInUseError, match=holder):
        runtime.fit(count_up, {"steps": 4}, resume="auto")
    with pytest.raises(RunInUseError, match=holder):
        DataParallelTrainer.restore(run).fit()
    with pytest.raises(RunExistsError):
        runtime.fit(count_up, {"steps": 4})
    assert others() == before
    running = Result.from_path(run)
    assert running.error is None
    assert running.metrics["step"] == 2
    assert files_of(running.checkpoint)["0.txt"] == "2"

    driver.kill()
    assert runtime.fit(count_up, {"steps": 4}, resume="auto").return_value == [2, 3]


@on_one_machine
def test_result_is_read_from_the_directory_of_a_run_that_has_finished_or_failed(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    finished = runtime.fit(count_up, {"steps": 4}, name="finished")
    read = Result.from_path(finished.path)
    assert (read.metrics, read.error, read.path) == (finished.metrics, None, finished.path)
    assert read.best_checkpoints == finished.best_checkpoints
    assert [metrics["step"] for _, metrics in read.best_checkpoints] == [1, 3]
    assert read.get_best_checkpoint("step") == read.checkpoint

    read = Result.from_path(fail(runtime, gate, {"steps": 5, "fail_at": 3}))
    assert read.metrics["step"] == 2
    assert files_of(read.checkpoint)["0.txt"] == "2"
    assert isinstance(read.error, TrainingFailedError)
    assert "RuntimeError: failed at step 3" in str(read.error)
    assert read.error.kind is FailureKind.USER_ERROR
    assert read.error.rank in range(runtime.world())


def truncate_a_file(run: Path) -> None:
    os.truncate(run / "checkpoint_000006" / "0.txt", 0)


def delete_a_file(run: Path) -> None:
    (run / "checkpoint_000006" / "0.txt").unlink()


def delete_the_directory(run: Path) -> None:
    shutil.rmtree(run / "checkpoint_000006")


def damage_the_list(run: Path) -> None:
    os.truncate(run / "checkpoint_000006" / ".checkpoint.json", 20)


def delete_the_manifest(run: Path) -> None:
    (run / "manifest.json").unlink()


def damage_the_manifest(run: Path) -> None:
    os.truncate(run / "manifest.json", (run / "manifest.json").stat().st_size // 2)


def damage_the_manifest_and_truncate_a_file(run: Path) -> None:
    damage_the_manifest(run)
    truncate_a_file(run)


def delete_the_manifest_and_a_file(run: Path) -> None:
    delete_the_manifest(run)
    delete_a_file(run)


@pytest.mark.parametrize(
    ("damage", "continued", "named"),
    [
        (truncate_a_file, 4, "run/checkpoint_000006/0.txt has 0 bytes instead of 1"),
        (delete_a_file, 4, "run/checkpoint_000006/0.txt is missing"),
        (delete_the_directory, 4, "without a .checkpoint.json"),
        (damage_the_list, 4, "run/checkpoint_000006/.checkpoint.json: expected JSON"),
        (delete_the_manifest, 6, "run/manifest.json is missing"),
        (damage_the_manifest, 6, "run/manifest.json is damaged"),
        (damage_the_manifest_and_truncate_a_file, 4, "run/manifest.json is damaged"),
        (
            delete_the_manifest_and_a_file,
            4,
            "from the lists of files in their directories (newest: checkpoint_000002, checkpoint_000004)",
        ),
    ],
)
@in_this_process
def test_damage_is_named_and_the_newest_intact_checkpoint_is_used(
    runtime: RuntimeUnderTest,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    continued: int,
    named: str,
) -> None:
    run = Path(runtime.fit(count_up, {"steps": 6}).path)
    damage(run)
    capfd.readouterr()

    result = runtime.fit(count_up, {"steps": 8}, resume="must", verbose=1)

    assert result.return_value == list(range(continued, 8))
    output = capfd.readouterr().err
    assert named in output
    (line,) = lines_about_resuming(output)
    assert f"continues from checkpoint_00000{continued}" in line
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=8, world=1)
    assert files_of(result.checkpoint) == {"0.txt": "8"}
    result.checkpoint.verify()  # type: ignore[union-attr]
    indexes = [int(name.removeprefix("checkpoint_")) for name in committed_names(result.path)]
    assert indexes == sorted(set(indexes)), "a number was used twice"


@in_this_process
def test_run_whose_checkpoints_are_all_damaged_starts_from_the_beginning(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(runtime.fit(count_up, {"steps": 4}).path)
    for name in directories(str(run)):
        (run / name / "0.txt").unlink()

    result = runtime.fit(count_up, {"steps": 4}, resume="must", verbose=1)

    assert result.return_value == [0, 1, 2, 3]
    output = capfd.readouterr().err
    assert "checkpoint_000004/0.txt is missing" in output
    assert "checkpoint_000002/0.txt is missing" in output
    assert "starts from the beginning" in lines_about_resuming(output)[0]
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=4, world=1)


@in_this_process
def test_files_of_a_newer_drivetrain_are_refused_and_left_as_they_are(runtime: RuntimeUnderTest) -> None:
    result = runtime.fit(count_up, {"steps": 2}, metadata={"dataset": "digits"})
    run = Path(result.path)
    checkpoint = result.checkpoint
    assert checkpoint is not None
    metadata = Path(checkpoint.path, ".metadata.json")
    assert json.loads(metadata.read_text()) == {"version": 1, "metadata": {"dataset": "digits"}}
    metadata.write_text('{"version": 2, "metadata": {}}')
    with pytest.raises(StorageError, match=r"\.metadata\.json was written by a newer drivetrain .*Upgrade drivetrain"):
        checkpoint.get_metadata()
    (run / "manifest.json").write_text('{"version": 2, "checkpoints": "in an unknown format"}')
    before = snapshot(run / "checkpoint_000002")

    for read in (lambda: runtime.fit(count_up, {"steps": 4}, resume="must"), lambda: Result.from_path(run).checkpoint):
        with pytest.raises(StorageError, match=r"run/manifest\.json was written by a newer drivetrain"):
            read()
    assert snapshot(run / "checkpoint_000002") == before
    assert json.loads((run / "manifest.json").read_text())["version"] == 2


@on_one_machine
def test_checkpoint_given_to_a_trainer_is_used_until_the_run_has_its_own(
    runtime: RuntimeUnderTest, gate: Pipe, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "0.txt").write_text("3")
    options = {"resume_from_checkpoint": Checkpoint(given), "resume": "auto"}

    fail(runtime, gate, {"steps": 8, "fail_at": 3}, **options)
    result = runtime.fit(count_up, {"steps": 6}, **options)
    assert result.return_value == [3, 4, 5]
    assert [line["step"] for line in read_lines(Path(result.path, "result.json"))] == [3, 4, 5]

    (given / "0.txt").write_text("0")
    assert runtime.fit(count_up, {"steps": 8}, **options).return_value == [6, 7]
    restored = DataParallelTrainer.restore(
        result.path, train_loop_config={"steps": 9}, resume_from_checkpoint=Checkpoint(given)
    )
    assert restored.fit().return_value == [8]
    with pytest.raises(ConfigurationError, match=r"expected a checkpoint that exists, got .* directory .*nowhere"):
        runtime.fit(count_up, {"steps": 1}, name="new", resume_from_checkpoint=Checkpoint(tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()


@on_one_machine
def test_clock_that_moves_backwards_does_not_change_the_order(
    runtime: RuntimeUnderTest, gate: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = time.time, iter(range(1, 1_000_000))
    monkeypatch.setattr(time, "time", lambda: real() - 3600 * next(calls))
    config = CheckpointConfig(num_to_keep=2)

    run = fail(runtime, gate, {"steps": 12, "fail_at": 9}, checkpoint_config=config)
    entries = json.loads((run / "manifest.json").read_text())["checkpoints"]
    assert entries[0]["time"] > entries[1]["time"]
    assert [entry["number"] for entry in entries] == [6, 8]
    result = runtime.fit(count_up, {"steps": 12}, resume="must", checkpoint_config=config)

    assert result.return_value == [8, 9, 10, 11]
    assert files_of(result.checkpoint)["0.txt"] == "12"
    assert_metrics_have_no_gap_and_no_duplicate(run, steps=12, world=runtime.world())
    assert len(committed_names(result.path)) == 2


@pytest.mark.parametrize("manifest", ["kept", "deleted"])
@on_one_machine
def test_latest_checkpoint_does_not_depend_on_times_of_files_and_commits(
    runtime: RuntimeUnderTest, manifest: str
) -> None:
    run = Path(runtime.fit(count_up, {"steps": 6}).path)
    hour = 3600
    for name, age in (("checkpoint_000002", -hour), ("checkpoint_000004", 0), ("checkpoint_000006", hour)):
        place = run / name
        moment = time.time() - age
        listing = json.loads((place / ".checkpoint.json").read_text())
        listing["entry"]["time"] = listing["entry"]["metrics"]["_timestamp"] = moment
        (place / ".checkpoint.json").write_text(json.dumps(listing))
        for path in (*place.rglob("*"), place):
            os.utime(path, (moment, moment))
    entries = json.loads((run / "manifest.json").read_text())
    for entry, age in zip(entries["checkpoints"], (-hour, 0, hour), strict=True):
        entry["time"] = entry["metrics"]["_timestamp"] = time.time() - age
    (run / "manifest.json").write_text(json.dumps(entries))
    if manifest == "deleted":
        (run / "manifest.json").unlink()

    assert Path(Result.from_path(run).checkpoint.path).name == "checkpoint_000006"  # type: ignore[union-attr]
    result = runtime.fit(count_up, {"steps": 8}, resume="must", checkpoint_config=CheckpointConfig(num_to_keep=2))

    assert result.return_value == [6, 7]
    assert committed_names(result.path) == ["checkpoint_000006", "checkpoint_000008"]
