"""Checkpoints that all ranks save together into one directory, as Orbax does, on a local directory and in a bucket."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    FailureConfig,
    Result,
    SessionError,
    StorageError,
    TrainingFailedError,
)
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import once_on_ray, same_on_ray, with_processes
from tests.contract.test_checkpoints import directories
from tests.contract.test_s3 import Bucket, bucket, server  # noqa: F401 - the fixtures
from tests.s3 import SlowDown
from tests.support import Pipe, release, wait_for_release, wait_until_exited

on_one_machine = pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
"""A rank's handling of its own calls, which does not depend on the runtime."""


@pytest.fixture(params=["directory", "bucket"])
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of ``RunConfig`` for the storage of the run."""
    return {} if request.param == "directory" else request.getfixturevalue("bucket").options


def stored_names(result: Result) -> list[str]:
    """Return the names of all directories of checkpoints with files in a run directory."""
    if isinstance(result.filesystem, type(Checkpoint("/").filesystem)):
        return directories(result.path)
    from pyarrow.fs import FileSelector

    # The server may list a directory whose files were deleted, as an object of size 0.
    entries = result.filesystem.get_file_info(FileSelector(result.path, recursive=True))
    names = {entry.path.removeprefix(result.path).split("/")[1] for entry in entries if entry.size}
    return sorted(name for name in names if name.startswith("checkpoint_"))


def contents(checkpoint: Checkpoint | None) -> dict[str, str]:
    assert checkpoint is not None
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        files = [file for file in Path(path).rglob("*") if file.is_file() and not file.name.startswith(".")]
        return {str(file.relative_to(path)): file.read_text() for file in files}


def train(config: dict) -> int:
    """Count steps in a file of each rank, which all ranks read when they resume."""
    context = drivetrain.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    start = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            (start,) = {int(Path(path, "state", f"{other}.txt").read_text()) for other in range(ranks)}
    for step in range(start + 1, config["steps"] + 1):
        with drivetrain.shared_checkpoint() as checkpoint:
            file = Path(checkpoint.path, "state", f"{rank}.txt")
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{step}")
            Path(checkpoint.path, "shared.txt").write_text("the same from all ranks")
            if context.attempt == 0 and step == config.get("fail_at"):
                if ranks > 1:
                    wait_for_release(config["gate"])
                raise ZeroDivisionError("before the report")
            drivetrain.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=config.get("mode", "sync"))
    return start


class ReleaseAfterCommit(drivetrain.Callback):
    """Lets the ranks continue once a checkpoint is committed."""

    def __init__(self, gate: Pipe, index: int, ranks: int) -> None:
        self._gate, self._index, self._ranks = gate, index, ranks

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        if checkpoint.number == self._index:
            for _ in range(self._ranks):
                self._gate.release()


@pytest.mark.parametrize("mode", once_on_ray("async", "sync"))
def test_ranks_save_together_fail_before_the_report_and_resume(
    runtime: RuntimeUnderTest, storage: dict, mode: str, gate: Pipe
) -> None:
    result = runtime.fit(
        train,
        {"steps": 5, "fail_at": 3, "mode": mode, "gate": gate.path},
        callbacks=[ReleaseAfterCommit(gate, 2, runtime.world())],
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        **storage,
    )

    assert result.return_value == 2, "the second attempt continues after the last committed checkpoint"
    assert list(result.metrics_dataframe["step"]) == [1, 2, 3, 4, 5]
    ranks = range(runtime.world())
    assert [contents(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
        {f"state/{rank}.txt": f"{step}" for rank in ranks} | {"shared.txt": "the same from all ranks"}
        for step in (4, 5)
    ]
    assert stored_names(result) == [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert "checkpoint_000003" not in stored_names(result), "the directory of the failed report is never used again"


def test_local_run_directory_is_written_directly(runtime: RuntimeUnderTest) -> None:
    def train() -> list[Any]:
        with drivetrain.shared_checkpoint() as checkpoint:
            file = Path(checkpoint.path, f"{drivetrain.get_context().get_world_rank()}.txt")
            file.write_text("content")
            drivetrain.report({}, checkpoint=checkpoint)
            return [checkpoint.path, os.stat(file).st_ino]

    result = runtime.fit(train)

    assert result.checkpoint is not None
    path, inode = result.return_value
    assert path == result.checkpoint.path == f"{result.path}/checkpoint_000001"
    assert os.stat(f"{path}/0.txt").st_ino == inode, "nothing was copied"


@same_on_ray
@with_processes
def test_rank_that_fails_during_the_save_ends_the_wait_of_the_others(
    runtime: RuntimeUnderTest, storage: dict, gate: Pipe
) -> None:
    def train(config: dict) -> None:
        with drivetrain.shared_checkpoint() as checkpoint:
            Path(checkpoint.path, "part.bin").write_text("incomplete")
            if drivetrain.get_context().get_world_rank() == 1:
                raise ZeroDivisionError("during the save")
            wait_for_release(config["gate"])  # the barrier of the framework

    with pytest.raises(TrainingFailedError, match=r"rank 1 .*during the save") as caught:
        runtime.fit(train, {"gate": gate.path}, **storage)

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@on_one_machine
def test_abandoned_checkpoint_is_deleted_and_the_next_one_uses_a_new_directory(
    runtime: RuntimeUnderTest, storage: dict
) -> None:
    def train() -> list[str]:
        rank = drivetrain.get_context().get_world_rank()
        names = []
        for step in range(4):
            try:
                with drivetrain.shared_checkpoint() as checkpoint:
                    assert not Path(checkpoint.path, f"{rank}.txt").exists()
                    names.append(Path(checkpoint.path).name)
                    Path(checkpoint.path, f"{rank}.txt").write_text(f"{step}")
                    if step % 2:
                        raise OSError("no space left")
                    drivetrain.report({"step": step}, checkpoint=checkpoint)
            except OSError:
                continue
        return names

    result = runtime.fit(train, **storage)

    assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == [
        "checkpoint_000001",
        "checkpoint_000003",
    ]
    assert stored_names(result) == ["checkpoint_000001", "checkpoint_000003"]
    assert [metrics["_training_iteration"] for _, metrics in result.best_checkpoints] == [1, 2]


@same_on_ray
@with_processes
def test_rank_that_leaves_without_a_report_is_an_error(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> None:
        with drivetrain.shared_checkpoint() as checkpoint:
            Path(checkpoint.path, "model.txt").write_text("content")
            if drivetrain.get_context().get_world_rank() == 0:
                drivetrain.report({}, checkpoint=checkpoint)
        wait_for_release(config["gate"])

    with pytest.raises(TrainingFailedError, match=r"rank 1 .*\[DT-810\] .*on every rank") as caught:
        runtime.fit(train, {"gate": gate.path})

    assert isinstance(caught.value.__cause__, SessionError)


@same_on_ray
@with_processes
def test_rank_that_does_not_take_part_is_an_error_and_nothing_is_committed(
    runtime: RuntimeUnderTest, storage: dict
) -> None:
    def train() -> None:
        if drivetrain.get_context().get_world_rank() == 1:
            drivetrain.report({"step": 1})
            return
        with drivetrain.shared_checkpoint() as checkpoint:
            Path(checkpoint.path, "model.txt").write_text("content")
            drivetrain.report({"step": 1}, checkpoint=checkpoint)

    with pytest.raises(TrainingFailedError, match=r"\[DT-417\] .*no report from rank 1") as caught:
        runtime.fit(train, **storage)

    assert isinstance(caught.value.__cause__, CheckpointError)
    path = storage.get("storage_path", runtime.storage_path)
    assert Result.from_path(f"{path}/run", storage.get("storage_filesystem")).checkpoint is None


@same_on_ray
@with_processes
def test_rank_that_reports_long_before_the_others_loses_no_files(
    runtime: RuntimeUnderTest,
    bucket: Bucket,  # noqa: F811
    gate: Pipe,
) -> None:
    """Rank 1 opens the directory only after rank 0 has left it, so rank 0 must not delete it."""

    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()
        if rank == 1:
            wait_for_release(config["gate"])
        for step in range(2):
            with drivetrain.shared_checkpoint() as checkpoint:
                Path(checkpoint.path, f"{rank}.txt").write_text(f"{step}")
                drivetrain.report({"step": step}, checkpoint=checkpoint)
        if rank == 0:
            release(config["gate"])

    result = runtime.fit(train, {"gate": gate.path}, **bucket.options)

    assert [contents(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
        {"0.txt": f"{step}", "1.txt": f"{step}"} for step in range(2)
    ]


@with_processes
@same_on_ray
def test_rank_that_is_lost_after_its_report_takes_only_that_checkpoint_with_it(
    runtime: RuntimeUnderTest,
    bucket: Bucket,  # noqa: F811
    gate: Pipe,
) -> None:
    """Rank 0 opens the directory after rank 1 was killed, when nothing protects the files of rank 1 any more."""

    def train(config: dict) -> int:
        context = drivetrain.get_context()
        if context.attempt == 0 and context.get_world_rank() == 0:
            wait_for_release(config["gate"])
            wait_until_exited([int(Path(config["pid"]).read_text())])
        with drivetrain.shared_checkpoint() as checkpoint:
            Path(checkpoint.path, f"{context.get_world_rank()}.txt").write_text(f"{context.attempt}")
            drivetrain.report({"step": 1}, checkpoint=checkpoint)
        if context.attempt == 0 and context.get_world_rank() == 1:
            Path(config["pid"]).write_text(str(os.getpid()))
            release(config["gate"])
            os.kill(os.getpid(), signal.SIGKILL)
        return context.attempt

    config = {"gate": gate.path, "pid": str(runtime.storage_path / "pid")}
    result = runtime.fit(train, config, failure_config=FailureConfig(max_failures=1), **bucket.options)

    assert result.return_value == 1
    assert contents(result.checkpoint) == {"0.txt": "1", "1.txt": "1"}


@same_on_ray
@pytest.mark.parametrize("mode", ["sync", "async"])
@with_processes
def test_upload_that_fails_is_the_error_of_the_run(
    runtime: RuntimeUnderTest,
    bucket: Bucket,  # noqa: F811
    mode: str,
) -> None:
    bucket.proxy.inject(SlowDown(), times=10_000, method="PUT", containing="checkpoint_")

    with pytest.raises(TrainingFailedError) as caught:
        runtime.fit(
            train,
            {"steps": 2, "mode": mode},
            sync_config=drivetrain.SyncConfig(sync_timeout=3),
            **bucket.options,
        )

    assert isinstance(caught.value.__cause__, StorageError)


def report_metrics(checkpoint: Checkpoint) -> None:
    drivetrain.report({"step": 1})


def report_another_checkpoint(checkpoint: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "file.txt").write_text("content")
        drivetrain.report({}, checkpoint=Checkpoint(directory))


def report_nothing(checkpoint: Checkpoint) -> None:
    pass


def report_twice(checkpoint: Checkpoint) -> None:
    Path(checkpoint.path, "file.txt").write_text("content")
    drivetrain.report({}, checkpoint=checkpoint)
    drivetrain.report({}, checkpoint=checkpoint)


def report_without_upload(checkpoint: Checkpoint) -> None:
    drivetrain.report({}, checkpoint=checkpoint, checkpoint_upload_mode="none")


def report_under_another_name(checkpoint: Checkpoint) -> None:
    drivetrain.report({}, checkpoint=checkpoint, checkpoint_dir_name="best")


def report_with_deletion(checkpoint: Checkpoint) -> None:
    drivetrain.report({}, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)


def share_another(checkpoint: Checkpoint) -> None:
    with drivetrain.shared_checkpoint():
        pass


@pytest.mark.parametrize(
    ("misuse", "named"),
    [
        (report_metrics, ""),
        (report_another_checkpoint, ""),
        (report_nothing, ""),
        (report_twice, ""),
        (report_without_upload, r"got checkpoint_upload_mode='none'\. Leave out this option"),
        (report_under_another_name, r"got checkpoint_dir_name='best'\. Leave out"),
        (report_with_deletion, r"got delete_local_checkpoint_after_upload=True\. Leave out"),
        (share_another, ""),
    ],
)
@on_one_machine
def test_misuse_is_an_error_that_names_the_correct_call(runtime: RuntimeUnderTest, misuse: Any, named: str) -> None:
    def train() -> None:
        with drivetrain.shared_checkpoint() as checkpoint:
            misuse(checkpoint)

    with pytest.raises(TrainingFailedError, match=rf"\[DT-810\].*{named}") as caught:
        runtime.fit(train)

    assert isinstance(caught.value.__cause__, SessionError)


@same_on_ray
@with_processes
def test_rank_that_writes_no_file_may_report_first(runtime: RuntimeUnderTest, storage: dict, gate: Pipe) -> None:
    def train(config: dict) -> None:
        with drivetrain.shared_checkpoint() as checkpoint:
            if drivetrain.get_context().get_world_rank() == 0:
                wait_for_release(config["gate"])
                Path(checkpoint.path, "0.txt").write_text("content")
            drivetrain.report({}, checkpoint=checkpoint)
        drivetrain.report({"reported": 1})

    class Release(drivetrain.Callback):
        def on_report(self, run: Any, report: Any) -> None:
            if report.rank == 1 and report.iteration == 2:
                gate.release()

    result = runtime.fit(train, {"gate": gate.path}, callbacks=[Release()], **storage)

    assert contents(result.checkpoint) == {"0.txt": "content"}


@on_one_machine
def test_empty_checkpoint_is_an_error(runtime: RuntimeUnderTest, storage: dict) -> None:
    def train() -> None:
        with drivetrain.shared_checkpoint() as checkpoint:
            drivetrain.report({}, checkpoint=checkpoint)

    with pytest.raises(TrainingFailedError, match=r"\[DT-408\] .*expected files in the shared checkpoint") as caught:
        runtime.fit(train, **storage)

    assert isinstance(caught.value.__cause__, CheckpointError)


def test_block_outside_a_train_function_is_an_error() -> None:
    with pytest.raises(SessionError, match=r"\[DT-801\] shared_checkpoint"), drivetrain.shared_checkpoint():
        pass
