import json
import os
import pickle
import signal
import tempfile
from pathlib import Path

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    FailureConfig,
    Result,
    SessionError,
    TrainingFailedError,
    WaitTimeoutError,
    WorkerDiedError,
)
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import in_this_process, once_on_ray, same_on_ray, with_processes
from tests.support import Collector, Pipe, read_lines, release, wait_for_release


def report_files(metrics: dict, files: dict[str, str]) -> None:
    """Report with a checkpoint of these files, and delete its source directory."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            file = Path(directory, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        drivetrain.report(metrics, checkpoint=Checkpoint.from_directory(directory))


def files_of(checkpoint: Checkpoint | None) -> dict[str, str]:
    """Return the user's files in a checkpoint."""
    assert checkpoint is not None
    root = Path(checkpoint.path)
    return {
        str(file.relative_to(root)): file.read_text()
        for file in sorted(root.rglob("*"))
        if file.is_file() and not file.name.startswith(".")
    }


def committed_names(run_directory: str) -> list[str]:
    manifest = json.loads(Path(run_directory, "manifest.json").read_text())
    return [entry["name"] for entry in manifest["checkpoints"]]


def directories(run_directory: str) -> list[str]:
    return sorted(entry.name for entry in Path(run_directory).glob("checkpoint_*"))


def test_files_of_all_ranks_are_merged_into_one_committed_checkpoint(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        drivetrain.report({"step": 0})
        report_files({"step": 1}, {f"part_{rank}.txt": f"of {rank}", f"deep/{rank}/x.txt": "nested"})

    collector = Collector()
    result = runtime.fit(train, callbacks=[collector])

    ranks = range(runtime.world())
    expected = {f"part_{rank}.txt": f"of {rank}" for rank in ranks} | {f"deep/{rank}/x.txt": "nested" for rank in ranks}
    assert files_of(result.checkpoint) == expected
    assert committed_names(result.path) == directories(result.path) == collector.checkpoints == ["checkpoint_000002"]
    ((checkpoint, metrics),) = result.best_checkpoints
    assert checkpoint == result.checkpoint
    assert (metrics["step"], metrics["_training_iteration"]) == (1, 2)
    assert Result.from_path(result.path).checkpoint == checkpoint


@same_on_ray
def test_checkpoints_of_a_single_rank_are_committed_after_the_others_have_returned(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(3):
            if rank == 0:
                report_files({"step": step}, {"state.txt": str(step)})
            elif step < 2:
                drivetrain.report({"step": step})

    result = runtime.fit(train)

    assert committed_names(result.path) == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000003"]
    assert files_of(result.checkpoint) == {"state.txt": "2"}


@same_on_ray
def test_best_checkpoints_by_score_and_the_latest_are_kept(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        for score in (3, 9, 1, 8, 2):
            report_files({"score": score}, {"score.txt": str(score)})

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="max")
    result = runtime.fit(train, workers=1, checkpoint_config=config)

    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [9, 8, 2]
    assert directories(result.path) == committed_names(result.path)
    assert files_of(result.checkpoint) == {"score.txt": "2"}
    assert files_of(result.get_best_checkpoint("score")) == {"score.txt": "9"}
    assert files_of(result.get_best_checkpoint("score", "min")) == {"score.txt": "2"}


@same_on_ray
def test_checkpoint_has_the_metadata_of_the_trainer_and_its_own_takes_precedence(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "weights.txt").write_text("1")
            checkpoint = Checkpoint.from_directory(directory)
            checkpoint.set_metadata({"epoch": 7, "owner": "the function"})
            drivetrain.report({}, checkpoint=checkpoint)

    result = runtime.fit(train, workers=1, metadata={"dataset": "digits", "owner": "the trainer"})

    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"dataset": "digits", "epoch": 7, "owner": "the function"}


@same_on_ray
def test_get_checkpoint_returns_the_last_reported_checkpoint(runtime: RuntimeUnderTest) -> None:
    def train() -> list:
        seen = [drivetrain.get_checkpoint()]
        for step in range(2):
            report_files({}, {"step.txt": str(step)})
            with drivetrain.get_checkpoint().as_directory() as path:
                seen.append(Path(path, "step.txt").read_text())
        return seen

    assert runtime.fit(train, workers=1).return_value == [None, "0", "1"]


@same_on_ray
def test_new_run_starts_from_a_checkpoint_of_another_run(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    def train() -> str:
        checkpoint = drivetrain.get_checkpoint()
        assert checkpoint is not None
        return Path(checkpoint.path, "weights.txt").read_text()

    given = tmp_path / "given"
    given.mkdir()
    (given / "weights.txt").write_text("from before")

    result = runtime.fit(train, resume_from_checkpoint=Checkpoint(given))

    assert result.return_value == "from before"
    assert result.checkpoint is None


@same_on_ray
@pytest.mark.parametrize("made", ["missing", "empty"])
def test_checkpoint_without_files_is_refused_by_report(runtime: RuntimeUnderTest, made: str) -> None:
    def train(config: dict) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = directory if config["made"] == "empty" else f"{directory}/nowhere"
            try:
                drivetrain.report({}, checkpoint=Checkpoint.from_directory(path))
            except CheckpointError as error:
                drivetrain.report({"refused": str(error)})

    result = runtime.fit(train, {"made": made}, workers=1)

    assert "expected the checkpoint's directory" in result.metrics["refused"]
    assert directories(result.path) == []


@same_on_ray
@with_processes
def test_file_reported_by_all_ranks_with_the_same_content_is_stored_once(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        report_files({}, {"shared.txt": "same", f"own_{rank}.txt": str(rank)})

    result = runtime.fit(train, workers=3)

    assert files_of(result.checkpoint) == {
        "own_0.txt": "0", "own_1.txt": "1", "own_2.txt": "2", "shared.txt": "same"
    }  # fmt: skip


@with_processes
def test_file_reported_by_all_ranks_is_that_of_rank_0_with_one_warning(
    runtime: RuntimeUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(5):
            report_files({}, {"shared.txt": f"made by {rank} in step {step}"})

    result = runtime.fit(train)

    contents = [files_of(checkpoint)["shared.txt"] for checkpoint, _ in result.best_checkpoints]
    assert contents == [f"made by 0 in step {step}" for step in range(5)]
    errors = capsys.readouterr().err
    assert errors.count("[DT-422] ranks 0 and 1 reported 'shared.txt' for checkpoint_000001") == 1
    assert errors.count("DT-422") == 1


@pytest.mark.parametrize("mode", once_on_ray("sync", "async"))
def test_report_that_waits_returns_once_the_checkpoint_is_committed(runtime: RuntimeUnderTest, mode: str) -> None:
    def train() -> list[list[str]]:
        rank, seen = drivetrain.get_context().get_world_rank(), []
        for step in range(3):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, f"of_{rank}").touch()
                checkpoint = Checkpoint.from_directory(directory) if rank == 0 else None
                drivetrain.report({"step": step}, checkpoint, checkpoint_upload_mode=mode, wait=60)
            if rank == 0:
                seen.append(committed_names(drivetrain.get_context().get_run_dir()))
        return seen

    names = [f"checkpoint_{number:06d}" for number in (1, 2, 3)]
    assert runtime.fit(train).return_value == [names[:1], names[:2], names]


@same_on_ray
@with_processes
def test_report_that_waits_too_long_names_the_missing_ranks(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> str:
        if drivetrain.get_context().get_world_rank() == 0:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "file").touch()
                with pytest.raises(WaitTimeoutError) as late:
                    drivetrain.report({}, Checkpoint.from_directory(directory), wait=0.2)
            release(config["gate"])
            assert late.value.ranks == (1,)
            return str(late.value)
        wait_for_release(config["gate"])
        return ""

    message = runtime.fit(train, {"gate": gate.path}).return_value
    assert "expected checkpoint_000001 to be committed within 0.2 s, but it still waits for rank 1." in message


@same_on_ray
@with_processes
def test_checkpoints_that_waited_for_a_rank_are_named_when_the_run_fails(
    runtime: RuntimeUnderTest, gate: Pipe, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: dict) -> None:
        if drivetrain.get_context().get_world_rank() == 1:
            wait_for_release(config["gate"])
        for step in range(3):
            report_files({"step": step}, {"file": str(step)})
        raise ValueError("rank 0 fails")

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, {"gate": gate.path})

    lost = (
        "[DT-424] not committed, and lost: checkpoint_000001, checkpoint_000002, checkpoint_000003. They waited for "
        "files or reports of rank 1"
    )
    assert lost in str(failed.value)
    assert lost in capsys.readouterr().err
    assert Result.from_path(runtime.storage_path / "run").checkpoint is None


@same_on_ray
@with_processes
def test_checkpoints_of_a_rank_do_not_wait_for_ranks_that_have_stopped_reporting(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    def train(config: dict) -> None:
        drivetrain.report({"step": 0})
        if drivetrain.get_context().get_world_rank() == 1:
            wait_for_release(config["gate"])
            return
        for step in range(1, 4):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state.txt").write_text(str(step))
                drivetrain.report({"step": step}, Checkpoint.from_directory(directory), wait=30)
        release(config["gate"])

    result = runtime.fit(train, {"gate": gate.path}, checkpoint_config=CheckpointConfig(num_to_keep=2))

    assert committed_names(result.path) == ["checkpoint_000003", "checkpoint_000004"]


@same_on_ray
@with_processes
def test_late_files_of_a_rank_are_added_and_make_earlier_commits_invalid(
    runtime: RuntimeUnderTest, gate: Pipe, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()
        if rank == 1:
            wait_for_release(config["gate"])
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"part_{rank}.txt").write_text(str(rank))
            checkpoint = Checkpoint.from_directory(directory)
            drivetrain.report({"step": 1}, checkpoint, wait=30)
            if rank == 1:
                raise ValueError("rank 1 fails before it saves again")
            drivetrain.report({"step": 2}, checkpoint, wait=30)
        release(config["gate"])
        signal.pause()

    with pytest.raises(TrainingFailedError):
        runtime.fit(train, {"gate": gate.path})

    result = Result.from_path(runtime.storage_path / "run")
    assert files_of(result.checkpoint) == {"part_0.txt": "0", "part_1.txt": "1"}
    assert committed_names(result.path) == ["checkpoint_000001"], "the second one lacks the files of rank 1"
    assert (
        "[DT-431] rank 1 has begun to save, so checkpoint_000001, checkpoint_000002, committed"
        in capsys.readouterr().err
    )


@same_on_ray
@with_processes
def test_files_of_a_rank_that_saves_sometimes_are_added_to_a_committed_checkpoint(
    runtime: RuntimeUnderTest, gate: Pipe, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: dict) -> None:
        if drivetrain.get_context().get_world_rank() == 1:
            drivetrain.report({"step": 1})
            wait_for_release(config["gate"])
            report_files({"step": 2}, {"predictions.txt": "of rank 1"})
            return
        for step in range(1, 4):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state.txt").write_text(str(step))
                drivetrain.report({"step": step}, Checkpoint.from_directory(directory), wait=30)
        release(config["gate"])

    result = runtime.fit(train, {"gate": gate.path})

    second, third = (Checkpoint.from_directory(Path(result.path, f"checkpoint_00000{number}")) for number in (2, 3))
    assert files_of(second) == {"predictions.txt": "of rank 1", "state.txt": "2"}
    assert files_of(third) == {"state.txt": "3"}
    second.verify()
    assert "DT-431" not in capsys.readouterr().err


@same_on_ray
@with_processes
def test_checkpoint_that_waits_for_long_is_named_with_the_ranks(
    runtime: RuntimeUnderTest, gate: Pipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain._driver.commits._WARNING_S", 0.2)

    def train(config: dict) -> None:
        with tempfile.TemporaryDirectory() as directory:
            rank = drivetrain.get_context().get_world_rank()
            Path(directory, f"part_{rank}.txt").write_text("state")
            checkpoint = Checkpoint.from_directory(directory)
            drivetrain.report({"step": 1}, checkpoint, wait=30)
            if rank == 1:
                wait_for_release(config["gate"])
                return
            with pytest.raises(WaitTimeoutError):
                drivetrain.report({"step": 2}, checkpoint, wait=1)
        release(config["gate"])

    runtime.fit(train, {"gate": gate.path})

    output = capsys.readouterr().err
    assert "[DT-430] not committed for 0 s: checkpoint_000002, until rank 1 reports as often, because" in output
    assert "If only rank 0 has files now, pass report(..., checkpoint_ranks=[0])" in output


@same_on_ray
@with_processes
def test_checkpoint_of_declared_ranks_is_not_committed_without_one_of_them(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"part_{rank}.txt").write_text("1")
            checkpoint = Checkpoint.from_directory(directory) if rank == 0 else None
            drivetrain.report({"step": 1}, checkpoint, checkpoint_ranks="all")

    with pytest.raises(
        TrainingFailedError, match=r"DT-417\] report\(checkpoint_ranks=...\).*got no report from rank 1"
    ):
        runtime.fit(train)

    assert Result.from_path(runtime.storage_path / "run").checkpoint is None


@pytest.mark.parametrize("ranks", [[0, 7], [1], "both", 1, [0, "1"]])
@in_this_process
def test_ranks_of_a_checkpoint_that_cannot_be_are_refused(runtime: RuntimeUnderTest, ranks: object) -> None:
    def train(config: dict) -> str:
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = Checkpoint.from_directory(directory)
            with pytest.raises(SessionError, match="DT-805") as refused:
                drivetrain.report({"step": 1}, checkpoint, checkpoint_ranks=config["ranks"])
        return str(refused.value)

    message = runtime.fit(train, {"ranks": ranks}).return_value
    assert f"that contains this rank, 0, got {ranks!r}" in message


@same_on_ray
@with_processes
def test_retry_without_a_checkpoint_says_so(runtime: RuntimeUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        if drivetrain.get_context().attempt == 0:
            raise ValueError("the first attempt fails")

    runtime.fit(train, failure_config=FailureConfig(max_failures=1))

    assert (
        "this attempt starts from the beginning, because the run has no complete checkpoint" in capsys.readouterr().err
    )


@in_this_process
def test_summary_names_the_report_of_a_checkpoint_that_has_another_number_after_a_retry(
    runtime: RuntimeUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        report_files({"step": 1}, {"state.txt": "1"})
        if drivetrain.get_context().attempt == 0:
            drivetrain.report({"step": 2})
            raise ValueError("the first attempt fails")

    runtime.fit(train, failure_config=FailureConfig(max_failures=1), verbose=1)

    assert "report 2 | step 1 | checkpoint_000003 of report 2" in capsys.readouterr().err


@same_on_ray
@with_processes
def test_errors_of_all_ranks_are_kept(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        if rank == 0:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else None
        raise ValueError(f"of rank {rank}")

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, workers=3)

    failures = failed.value.worker_failures
    assert failed.value.rank in failures
    assert {rank: type(error) for rank, error in failures.items()}.items() <= {
        1: ValueError,
        2: WorkerDiedError,
    }.items()
    assert pickle.loads(pickle.dumps(failed.value)).worker_failures.keys() == failures.keys()


@same_on_ray
@with_processes
def test_file_reported_by_two_ranks_with_different_content_fails_and_names_both(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        report_files({}, {"shared.txt": f"made by {rank}"})

    with pytest.raises(TrainingFailedError, match=r"ranks 0 and 1 reported 'shared\.txt'") as failed:
        runtime.fit(train, checkpoint_config=CheckpointConfig(on_conflict="error"))

    assert isinstance(failed.value.__cause__, CheckpointError)
    assert Result.from_path(runtime.storage_path / "run").checkpoint is None


def train_exactly(config: dict) -> int:
    """Train a toy with exact state: a product of two numbers per step, checkpointed every second step.

    ``disturb`` names the failure that happens in the first attempt, in the middle between two checkpoints.
    """
    context = drivetrain.get_context()
    rank = context.get_world_rank()
    state, start = 1 + rank, 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            saved = json.loads(Path(path, f"rank_{rank}.json").read_text())
        state, start = saved["state"], saved["step"]
    for step in range(start, config["steps"]):
        state = (state * 6364136223846793005 + step) % 2**61
        if config["disturb"] and context.attempt == 0 and step == 6:
            disturb(config["disturb"], rank, config["gate"])
        if config["disturb"] == "SIGKILL ahead of the other rank" and context.attempt == 0 and rank == 1 and step == 2:
            release(config["gate"])
            signal.pause()
        if step % 2 == 1:
            report_files({"step": step}, {f"rank_{rank}.json": json.dumps({"state": state, "step": step + 1})})
    return state


def disturb(how: str, rank: int, gate: str) -> None:
    if how == "exception":
        raise RuntimeError("the first attempt fails in the middle")
    if rank == 1:
        release(gate)
        return
    wait_for_release(gate)
    os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(steps: int) -> int:
    state = 1
    for step in range(steps):
        state = (state * 6364136223846793005 + step) % 2**61
    return state


@same_on_ray
def test_run_that_resumes_after_an_exception_ends_with_the_parameters_of_an_undisturbed_run(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    collector = Collector()
    result = runtime.fit(
        train_exactly,
        {"steps": 10, "disturb": "exception", "gate": gate.path},
        failure_config=FailureConfig(max_failures=1),
        callbacks=[collector],
    )

    assert result.return_value == undisturbed(10)
    assert collector.attempts == 2
    assert isinstance(collector.failures[0].exception, RuntimeError)
    assert directories(result.path) == committed_names(result.path)
    assert (result.metrics["step"], result.metrics["_training_iteration"]) == (9, 5)


@same_on_ray
@pytest.mark.parametrize(
    "when", ["SIGKILL after the other rank", "SIGKILL ahead of the other rank"], ids=["after", "ahead"]
)
@with_processes
def test_run_that_resumes_after_sigkill_mid_epoch_ends_with_the_parameters_of_an_undisturbed_run(
    runtime: RuntimeUnderTest, gate: Pipe, when: str
) -> None:
    collector = Collector()
    result = runtime.fit(
        train_exactly,
        {"steps": 10, "disturb": when, "gate": gate.path},
        failure_config=FailureConfig(max_failures=1),
        callbacks=[collector],
    )

    assert result.return_value == undisturbed(10)
    (failure,) = collector.failures
    assert isinstance(failure.exception, WorkerDiedError)
    assert failure.rank == 0
    assert directories(result.path) == committed_names(result.path)
    reported = [line["step"] for line in read_lines(Path(result.path, "result.json"))]
    assert reported == [1, 3, 5, 7, 9], "a repeated step was recorded twice"


@with_processes
def test_checkpoint_of_a_rank_that_died_before_completing_it_does_not_exist(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    def train(config: dict) -> list:
        context = drivetrain.get_context()
        rank = context.get_world_rank()
        if context.attempt == 1:
            checkpoint = drivetrain.get_checkpoint()
            return [Path(checkpoint.path).name, sorted(os.listdir(Path(checkpoint.path).parent))]
        report_files({}, {f"{rank}.txt": "first"})
        if rank == 1:
            wait_for_release(config["gate"])
            os.kill(os.getpid(), signal.SIGKILL)
        report_files({}, {f"{rank}.txt": "second"})
        release(config["gate"])
        signal.pause()
        return []

    result = runtime.fit(train, {"gate": gate.path}, failure_config=FailureConfig(max_failures=1))

    name, found = result.return_value
    assert name == "checkpoint_000001"
    assert "checkpoint_000002" not in found
    assert files_of(result.checkpoint) == {"0.txt": "first", "1.txt": "first"}
