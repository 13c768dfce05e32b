import json
from pathlib import Path

import pytest

import drivetrain
from drivetrain import FailureConfig, Result, RunExistsError, StorageError, TrainingFailedError
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import driver_only
from tests.contract.test_checkpoints import committed_names, directories, report_files
from tests.support import read_lines, snapshot


def count_up(config: dict) -> list[int]:
    """Resume from the checkpoint, and fail after a number of steps if configured."""
    rank = drivetrain.get_context().get_world_rank()
    checkpoint = drivetrain.get_checkpoint()
    start = 0 if checkpoint is None else int(Path(checkpoint.path, f"{rank}.txt").read_text())
    done = []
    for step in range(start, config["steps"]):
        if step == config.get("fail_at"):
            raise RuntimeError(f"failed at step {step}")
        report_files({"step": step}, {f"{rank}.txt": str(step + 1)})
        done.append(step)
    return done


def test_existing_name_is_refused_and_the_run_is_unchanged(runtime: RuntimeUnderTest) -> None:
    result = runtime.fit(count_up, {"steps": 2})
    before = snapshot(Path(result.path))

    with pytest.raises(RunExistsError, match=r"'run' exists.*resume=\"auto\""):
        runtime.fit(count_up, {"steps": 5})

    assert snapshot(Path(result.path)) == before


def test_directory_with_unrelated_files_is_refused_and_unchanged(runtime: RuntimeUnderTest) -> None:
    foreign = runtime.storage_path / "run"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")

    with pytest.raises(RunExistsError, match="expected a new or empty run directory"):
        runtime.fit(count_up, {"steps": 1})

    assert [(file.name, file.read_text()) for file in foreign.iterdir()] == [("thesis.txt", "years of work")]


def test_failed_run_resumes_from_its_latest_checkpoint_and_prints_it(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingFailedError):
        runtime.fit(count_up, {"steps": 5, "fail_at": 3}, workers=1, resume="auto")
    run_directory = runtime.storage_path / "run"
    run_id = json.loads((run_directory / "run.json").read_text())["id"]
    left_behind = run_directory / "checkpoint_000099"
    left_behind.mkdir()
    capfd.readouterr()

    result = runtime.fit(count_up, {"steps": 5}, workers=1, resume="must", verbose=1)

    assert result.return_value == [3, 4]
    assert json.loads((run_directory / "run.json").read_text())["id"] == run_id
    assert [line["step"] for line in read_lines(run_directory / "result.json")] == [0, 1, 2, 3, 4]
    assert [line["_training_iteration"] for line in read_lines(run_directory / "result.json")] == [1, 2, 3, 4, 5]
    assert directories(result.path) == committed_names(result.path)
    assert len(committed_names(result.path)) == 5
    (message,) = [line for line in capfd.readouterr().err.splitlines() if "resume=" in line]
    assert "continues from checkpoint_000003" in message
    assert "1 uncommitted" in message
    assert not (run_directory / "error.json").exists()
    assert Result.from_path(run_directory).error is None


@driver_only
def test_run_that_does_not_exist_is_started_by_auto_and_refused_by_must(runtime: RuntimeUnderTest) -> None:
    with pytest.raises(StorageError, match='resume="must"'):
        runtime.fit(count_up, {"steps": 2}, resume="must")
    assert not (runtime.storage_path / "run").exists()

    assert runtime.fit(count_up, {"steps": 2}, resume="auto").return_value == [0, 1]


@driver_only
def test_run_that_failed_before_its_first_checkpoint_starts_from_the_beginning(runtime: RuntimeUnderTest) -> None:
    with pytest.raises(TrainingFailedError):
        runtime.fit(count_up, {"steps": 2, "fail_at": 0}, failure_config=FailureConfig(max_failures=1))

    assert runtime.fit(count_up, {"steps": 2}, resume="must").return_value == [0, 1]


@driver_only
def test_finished_run_is_continued_with_more_steps(runtime: RuntimeUnderTest) -> None:
    runtime.fit(count_up, {"steps": 2})

    result = runtime.fit(count_up, {"steps": 4}, resume="auto")

    assert result.return_value == [2, 3]
    assert result.metrics["_training_iteration"] == 4
