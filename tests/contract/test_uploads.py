import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    FailureConfig,
    FailureKind,
    SessionError,
    StorageError,
    TrainingFailedError,
)
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import in_this_process, once_on_ray, same_on_ray, with_processes
from tests.contract.test_checkpoints import committed_names, directories, files_of
from tests.support import Pipe, release, wait_for_release

on_one_machine = pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
"""A rank's handling of its own directory before an upload, which does not depend on the runtime."""

MEMORY = "/dev/shm"


@pytest.fixture(params=["the storage's device", "another device"])
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The directory in which a train function makes the directories that it reports."""
    if request.param == "the storage's device":
        (tmp_path / "local").mkdir()
        yield str(tmp_path / "local")
        return
    require_another_device(tmp_path)
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield directory


def require_another_device(directory: Path) -> None:
    if not os.path.isdir(MEMORY) or os.stat(MEMORY).st_dev == directory.stat().st_dev:
        pytest.skip(f"{MEMORY} is on the same device as the temporary directory")


def run_directory(config: dict) -> Path:
    """Return the run directory as a train function sees it; the context has no getter for it."""
    return Path(config["storage_path"], drivetrain.get_context().get_experiment_name())


def make_checkpoint(directory: str | Path, **files: str) -> Checkpoint:
    """Return a checkpoint of these files."""
    for name, text in files.items():
        file = Path(directory, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Checkpoint.from_directory(directory)


def wait_for_uploads() -> None:
    """Wait until no background upload of this process is in progress."""
    for thread in threading.enumerate():
        if thread.name.startswith("drivetrain upload"):
            thread.join(30)


def contents(result: drivetrain.Result) -> list[dict[str, str]]:
    return [files_of(checkpoint) for checkpoint, _ in result.best_checkpoints]


def test_directory_overwritten_and_deleted_right_after_the_report_is_stored_as_reported(
    runtime: RuntimeUnderTest, parent: str
) -> None:
    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(4):
            with tempfile.TemporaryDirectory(dir=config["parent"]) as directory:
                checkpoint = make_checkpoint(
                    directory, **{f"{rank}.txt": f"{step}" * 100_000, f"deep/{rank}.txt": f"{step}"}
                )
                drivetrain.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode="async")
                make_checkpoint(
                    directory, **{f"{rank}.txt": "spoilt", f"deep/{rank}.txt": "spoilt", "more.txt": "more"}
                )

    result = runtime.fit(train, {"parent": parent})

    ranks = range(runtime.world())
    assert contents(result) == [
        {f"{rank}.txt": f"{step}" * 100_000 for rank in ranks} | {f"deep/{rank}.txt": f"{step}" for rank in ranks}
        for step in range(4)
    ]
    assert committed_names(result.path) == directories(result.path)
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()


@pytest.mark.parametrize("mode", ["sync", "async"])
@on_one_machine
def test_given_away_directory_is_moved_if_possible_and_removed_at_once(
    runtime: RuntimeUnderTest, parent: str, mode: str
) -> None:
    def train(config: dict) -> tuple[bool, int]:
        with tempfile.TemporaryDirectory(dir=config["parent"]) as directory:
            checkpoint = make_checkpoint(directory, **{f"{number}.txt": f"{number}" * 50_000 for number in range(50)})
            inode = os.stat(f"{directory}/7.txt").st_ino
            drivetrain.report(
                {},
                checkpoint=checkpoint,
                checkpoint_upload_mode=config["mode"],
                delete_local_checkpoint_after_upload=True,
            )
            return os.path.exists(directory), inode

    result = runtime.fit(train, {"parent": parent, "mode": mode}, workers=1)

    left, inode = result.return_value
    assert not left
    assert contents(result) == [{f"{number}.txt": f"{number}" * 50_000 for number in range(50)}]
    assert result.checkpoint is not None
    if not parent.startswith(MEMORY):
        assert Path(result.checkpoint.path, "7.txt").stat().st_ino == inode, "nothing was copied"
    assert Path(result.checkpoint.path).stat().st_mode & 0o777 == Path(result.path).stat().st_mode & 0o777


@same_on_ray
@with_processes
def test_directories_given_away_by_all_ranks_are_merged(runtime: RuntimeUnderTest) -> None:
    def train() -> bool:
        rank = drivetrain.get_context().get_world_rank()
        left = False
        for step in range(3):
            directory = tempfile.mkdtemp()
            checkpoint = make_checkpoint(directory, **{f"{rank}.txt": f"{step}", "shared.txt": "same"})
            drivetrain.report({}, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)
            left |= os.path.exists(directory)
        return left

    result = runtime.fit(train)

    assert result.return_value is False
    assert contents(result) == [{"0.txt": f"{step}", "1.txt": f"{step}", "shared.txt": "same"} for step in range(3)]


@pytest.mark.parametrize("link", ["a file", "the directory"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@on_one_machine
def test_links_in_a_given_away_directory_are_stored_as_their_targets(
    runtime: RuntimeUnderTest, parent: str, mode: str, link: str
) -> None:
    def train(config: dict) -> str:
        cache = Path(config["parent"], "cache")
        make_checkpoint(cache, **{"weights.txt": "weights"})
        reported = Path(config["parent"], "reported")
        if config["link"] == "the directory":
            reported.symlink_to("cache")
        else:
            reported.mkdir()
            (reported / "weights.txt").symlink_to("../cache/weights.txt")
        drivetrain.report(
            {},
            checkpoint=Checkpoint(reported),
            checkpoint_upload_mode=config["mode"],
            delete_local_checkpoint_after_upload=True,
        )
        wait_for_uploads()
        return (cache / "weights.txt").read_text()

    result = runtime.fit(train, {"parent": parent, "mode": mode, "link": link}, workers=1)

    assert result.return_value == "weights", "the target of a link was moved"
    assert contents(result) == [{"weights.txt": "weights"}]
    assert result.checkpoint is not None
    assert not os.path.islink(result.checkpoint.path)
    assert not os.path.islink(f"{result.checkpoint.path}/weights.txt")


@on_one_machine
def test_existing_checkpoint_of_the_run_is_copied_and_not_moved(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        with tempfile.TemporaryDirectory() as directory:
            drivetrain.report({}, checkpoint=make_checkpoint(directory, **{"weights.txt": "1"}))
        committed = {"checkpoint": drivetrain.get_checkpoint(), "checkpoint_dir_name": "best"}
        drivetrain.report({}, **committed, delete_local_checkpoint_after_upload=True)

    result = runtime.fit(train, workers=1)

    assert contents(result) == [{"weights.txt": "1"}] * 2
    assert committed_names(result.path) == ["checkpoint_000001", "best"]


def test_directory_in_the_run_directory_is_adopted_in_place(runtime: RuntimeUnderTest) -> None:
    def train(config: dict) -> list[int]:
        rank = drivetrain.get_context().get_world_rank()
        inodes = []
        for step in range(3):
            place = run_directory(config) / f"step_{step}"
            drivetrain.report(
                {}, checkpoint=make_checkpoint(place, **{f"{rank}.txt": f"{step}"}), checkpoint_upload_mode="none"
            )
            inodes.append((place / f"{rank}.txt").stat().st_ino if step == 2 else 0)
        return inodes

    result = runtime.fit(
        train, {"storage_path": str(runtime.storage_path)}, checkpoint_config=CheckpointConfig(num_to_keep=2)
    )

    assert committed_names(result.path) == ["step_1", "step_2"]
    assert sorted(entry.name for entry in Path(result.path).glob("step_*")) == ["step_1", "step_2"]
    assert contents(result) == [{f"{rank}.txt": f"{step}" for rank in range(runtime.world())} for step in (1, 2)]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "0.txt").stat().st_ino == result.return_value[2]
    result.checkpoint.verify()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("../elsewhere", "its own directory in the run directory"),
        ("run/../elsewhere", "its own directory in the run directory"),
        ("run", "its own directory in the run directory"),
        ("run/artifacts", "its own directory in the run directory"),
        ("run/logs", "its own directory in the run directory"),
        ("run/.pending", "its own directory in the run directory"),
        ("run/missing", "with at least one file, got no files in 'missing'"),
    ],
)
@on_one_machine
def test_directory_that_retention_must_not_delete_is_not_adopted(
    runtime: RuntimeUnderTest, place: str, reason: str
) -> None:
    def train(config: dict) -> str:
        path = f"{config['storage_path']}/{config['place']}"
        if config["place"] != "run/missing":
            make_checkpoint(path, **{"weights.txt": "1"})
        try:
            drivetrain.report({}, checkpoint=Checkpoint(path), checkpoint_upload_mode="none")
        except CheckpointError as error:
            return str(error)
        return ""

    result = runtime.fit(train, {"storage_path": str(runtime.storage_path), "place": place}, workers=1)

    assert reason in result.return_value
    assert result.checkpoint is None


@same_on_ray
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_custom_upload_function_stores_the_checkpoint(runtime: RuntimeUnderTest, mode: str) -> None:
    def train(config: dict) -> tuple[str, bool]:
        rank = drivetrain.get_context().get_world_rank()
        seen = []

        def move(checkpoint: Checkpoint, name: str) -> Checkpoint:
            seen.append(name)
            place = run_directory(config) / name
            place.mkdir(exist_ok=True)
            text = Path(checkpoint.path, "weights.txt").read_text()
            (place / f"{rank}.txt").write_text(text.upper())
            return Checkpoint(place)

        directory = tempfile.mkdtemp()
        drivetrain.report(
            {},
            checkpoint=make_checkpoint(directory, **{"weights.txt": "weights"}),
            checkpoint_upload_mode=config["mode"],
            checkpoint_upload_fn=move,
            delete_local_checkpoint_after_upload=True,
        )
        wait_for_uploads()
        return seen[0], os.path.exists(directory)

    result = runtime.fit(train, {"storage_path": str(runtime.storage_path), "mode": mode})

    assert result.return_value == ("checkpoint_000001", False)
    assert contents(result) == [{f"{rank}.txt": "WEIGHTS" for rank in range(runtime.world())}]
    assert result.checkpoint is not None
    result.checkpoint.verify()


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("None", "expected a Checkpoint in the run directory as return value, got None"),
        ("checkpoint", "its own directory in the run directory"),
        ("Checkpoint(run_directory(config) / 'other')", "checkpoint in 'checkpoint_000001' .* got 'other'"),
    ],
)
@on_one_machine
def test_invalid_return_value_of_a_custom_upload_function_is_refused(
    runtime: RuntimeUnderTest, returned: str, reason: str
) -> None:
    def train(config: dict) -> None:
        def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
            make_checkpoint(run_directory(config) / "other", **{"weights.txt": "1"})
            return eval(config["returned"], globals() | {"config": config, "checkpoint": checkpoint})

        with tempfile.TemporaryDirectory() as directory:
            drivetrain.report({}, make_checkpoint(directory, **{"weights.txt": "1"}), checkpoint_upload_fn=store)

    with pytest.raises(TrainingFailedError, match=reason) as failed:
        runtime.fit(train, {"storage_path": str(runtime.storage_path), "returned": returned}, workers=1)
    assert isinstance(failed.value.__cause__, CheckpointError)


def report_under(name: str, *, mode: str = "sync", **files: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(directory, **files)
        drivetrain.report({"name": name}, checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)


@pytest.mark.parametrize("mode", once_on_ray("async", "sync"))
def test_checkpoints_are_stored_in_the_directories_named_by_the_ranks(runtime: RuntimeUnderTest, mode: str) -> None:
    def train(config: dict) -> str:
        rank = drivetrain.get_context().get_world_rank()
        for name in ("epoch=1", "best so far", "ünïcode-3.ckpt"):
            report_under(name, mode=config["mode"], **{f"{rank}.txt": name})
        wait_for_uploads()
        return Path(drivetrain.get_checkpoint().path).name

    result = runtime.fit(train, {"mode": mode}, checkpoint_config=CheckpointConfig(num_to_keep=2))

    assert result.return_value == "ünïcode-3.ckpt"
    assert committed_names(result.path) == ["best so far", "ünïcode-3.ckpt"]
    assert contents(result)[0] == {f"{rank}.txt": "best so far" for rank in range(runtime.world())}
    assert not os.path.exists(f"{result.path}/epoch=1")
    assert [metrics["name"] for _, metrics in result.best_checkpoints] == committed_names(result.path)
    assert os.listdir(f"{result.path}/.pending") == []


@pytest.mark.parametrize(
    "name", ["timeline.jsonl", "usage.jsonl", "result.json", "result_rank_1.json", "events.out.tfevents.1", ".lock"]
)
@in_this_process
def test_reserved_file_name_is_refused_before_anything_is_stored(runtime: RuntimeUnderTest, name: str) -> None:
    with pytest.raises(TrainingFailedError, match="directory name that does not begin with a dot") as failed:
        runtime.fit(lambda: report_under(name, **{"0.txt": "1"}))
    assert isinstance(failed.value.__cause__, SessionError)
    assert failed.value.kind is FailureKind.USER_ERROR


@same_on_ray
@with_processes
def test_ranks_that_name_the_directory_differently_are_refused(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        report_under(f"of_{rank}", **{f"{rank}.txt": "1"})

    with pytest.raises(TrainingFailedError, match=r"the same name on all ranks, got of_0, of_1"):
        runtime.fit(train)
    assert json.loads(Path(runtime.storage_path, "run", "manifest.json").read_text())["checkpoints"] == []


@pytest.mark.parametrize("mode", ["sync", "async"])
@on_one_machine
def test_name_of_an_existing_checkpoint_is_refused_and_that_checkpoint_is_unchanged(
    runtime: RuntimeUnderTest, mode: str
) -> None:
    def train(config: dict) -> None:
        for step in range(2):
            report_under("best", mode=config["mode"], **{"weights.txt": f"{step}"})

    with pytest.raises(TrainingFailedError, match="'best'") as failed:
        runtime.fit(train, {"mode": mode}, workers=1)
    assert isinstance(failed.value.__cause__, CheckpointError)
    result = drivetrain.Result.from_path(runtime.storage_path / "run")
    assert contents(result) == [{"weights.txt": "0"}]


BAD_NAMES = [
    "", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "checkpoint_000001", "checkpoint_1", "artifacts", "logs",
    "run.json", "manifest.json", "result.json", "result_rank_1.json", "progress.csv", "trainer.pkl", "error.txt", 5,
]  # fmt: skip


@on_one_machine
def test_names_that_are_no_plain_directory_or_reserved_are_refused(runtime: RuntimeUnderTest) -> None:
    def train() -> list:
        refused = []
        for name in BAD_NAMES:
            try:
                report_under(name, **{"weights.txt": "1"})
            except SessionError as error:
                refused.append((name, f"got {name!r}" in str(error)))
        return refused

    result = runtime.fit(train, workers=1)

    assert result.return_value == [(name, True) for name in BAD_NAMES]
    assert result.checkpoint is None
    assert result.metrics == {}


@same_on_ray
@with_processes
def test_named_directory_of_a_failed_attempt_is_swept_and_its_name_can_be_reused(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    def train(config: dict) -> list[str]:
        context = drivetrain.get_context()
        place = run_directory(config) / "best"
        before = os.listdir(place) if place.exists() else []
        if context.attempt == 0 and context.get_world_rank() == 1:
            wait_for_release(config["gate"])
            raise RuntimeError("rank 1 does not report")
        report_under("best", **{f"{context.attempt}_{context.get_world_rank()}.txt": "1"})
        if context.attempt == 0:
            release(config["gate"])
            signal.pause()
        return before

    result = runtime.fit(
        train,
        {"storage_path": str(runtime.storage_path), "gate": gate.path},
        failure_config=FailureConfig(max_failures=1),
    )

    assert result.return_value in ([], ["1_1.txt"]), "files of the first attempt remain"
    assert contents(result) == [{"1_0.txt": "1", "1_1.txt": "1"}]
    assert committed_names(result.path) == ["best"]


@pytest.mark.parametrize("limit", [1, 3])
@on_one_machine
def test_number_of_uploads_in_flight_is_limited_by_the_configuration(runtime: RuntimeUnderTest, limit: int) -> None:
    def train(config: dict) -> int:
        together = threading.Barrier(config["limit"])
        lock = threading.Lock()
        uploading = maximum = 0

        def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
            nonlocal uploading, maximum
            with lock:
                uploading += 1
                maximum = max(maximum, uploading)
            together.wait(30)  # for the maximum number of uploads
            stored = make_checkpoint(run_directory(config) / name, **{"weights.txt": name})
            with lock:
                uploading -= 1
            return stored

        for _ in range(4 * config["limit"]):
            with tempfile.TemporaryDirectory() as directory:
                drivetrain.report(
                    {},
                    checkpoint=make_checkpoint(directory, **{"weights.txt": "1"}),
                    checkpoint_upload_mode="async",
                    checkpoint_upload_fn=store,
                )
        wait_for_uploads()
        return maximum

    result = runtime.fit(
        train,
        {"storage_path": str(runtime.storage_path), "limit": limit},
        workers=1,
        checkpoint_config=CheckpointConfig(max_uploads_in_flight=limit),
    )

    assert result.return_value == limit
    assert contents(result) == [{"weights.txt": name} for name in committed_names(result.path)]
    assert len(contents(result)) == 4 * limit


def fail_to_store(checkpoint: Checkpoint, name: str) -> Checkpoint:
    raise OSError(f"no room for {name}")


def report_with_failing_upload(config: dict) -> None:
    """Report a checkpoint whose background upload fails."""
    function = None
    if config["cause"] == "the storage":
        index = 1 + len(list(run_directory(config).glob("checkpoint_*")))
        (run_directory(config) / f"checkpoint_{index:06d}").write_text("a file in place of a directory")
    else:
        function = fail_to_store
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        drivetrain.report(
            {},
            checkpoint=make_checkpoint(directory, **{"weights.txt": "1"}),
            checkpoint_upload_mode="async",
            checkpoint_upload_fn=function,
        )


FAILURES = pytest.mark.parametrize(
    ("cause", "reason"), [("the function", "no room for checkpoint_000002"), ("the storage", "File exists")]
)


@FAILURES
@on_one_machine
def test_failed_background_upload_is_raised_once_by_the_next_report(
    runtime: RuntimeUnderTest, cause: str, reason: str
) -> None:
    if cause == "the storage":
        require_another_device(runtime.storage_path)

    def train(config: dict) -> list[str]:
        refused = []
        for step in range(4):
            if step == 1:
                report_with_failing_upload(config)
                wait_for_uploads()
                continue
            for _ in range(2):
                try:
                    with tempfile.TemporaryDirectory() as directory:
                        drivetrain.report({"step": step}, make_checkpoint(directory, **{"weights.txt": f"{step}"}))
                    break
                except StorageError as error:
                    refused.append(str(error))
        return refused

    result = runtime.fit(train, {"storage_path": str(runtime.storage_path), "cause": cause}, workers=1)

    (refused,) = result.return_value
    assert "a checkpoint was not stored because the background upload failed" in refused
    assert reason in refused
    assert committed_names(result.path) == ["checkpoint_000001", "checkpoint_000003", "checkpoint_000004"]
    assert [files["weights.txt"] for files in contents(result)] == ["0", "2", "3"]


@same_on_ray
@FAILURES
def test_failure_of_the_last_background_upload_fails_the_run(
    runtime: RuntimeUnderTest, gate: Pipe, cause: str, reason: str
) -> None:
    if cause == "the storage":
        require_another_device(runtime.storage_path)

    def train(config: dict) -> None:
        with tempfile.TemporaryDirectory() as directory:
            drivetrain.report({}, make_checkpoint(directory, **{"weights.txt": "the first"}))
        if drivetrain.get_context().get_world_rank() > 0:
            release(config["gate"])
            return
        for _ in range(drivetrain.get_context().get_world_size() - 1):
            wait_for_release(config["gate"])  # the first is committed once all ranks have reported it
        report_with_failing_upload(config)

    with pytest.raises(TrainingFailedError, match=reason) as failed:
        runtime.fit(train, {"storage_path": str(runtime.storage_path), "cause": cause, "gate": gate.path})
    assert isinstance(failed.value.__cause__, StorageError)
    assert (failed.value.kind, failed.value.rank) == (FailureKind.STORAGE, 0)
    assert contents(drivetrain.Result.from_path(runtime.storage_path / "run")) == [{"weights.txt": "the first"}]


@on_one_machine
def test_failures_of_several_background_uploads_are_all_reported(runtime: RuntimeUnderTest) -> None:
    def train(config: dict) -> str:
        begun = threading.Barrier(2)

        def fail_together(checkpoint: Checkpoint, name: str) -> Checkpoint:
            begun.wait(30)
            return fail_to_store(checkpoint, name)

        with tempfile.TemporaryDirectory() as directory:
            for _ in range(2):
                drivetrain.report(
                    {},
                    checkpoint=make_checkpoint(directory, **{"weights.txt": "1"}),
                    checkpoint_upload_mode="async",
                    checkpoint_upload_fn=fail_together,
                )
        wait_for_uploads()
        try:
            drivetrain.report({})
        except StorageError as error:
            return str(error)
        return ""

    message = runtime.fit(train, {"storage_path": str(runtime.storage_path)}, workers=1).return_value

    assert "2 checkpoints were not stored" in message
    assert "no room for checkpoint_000001" in message
    assert "no room for checkpoint_000002" in message


@same_on_ray
@with_processes
def test_ranks_may_store_their_parts_of_a_checkpoint_in_different_ways(runtime: RuntimeUnderTest) -> None:
    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(3):
            mode = ("sync", "async", "none")[(rank + step) % 3]
            place = run_directory(config) / f"step_{step}" if mode == "none" else Path(tempfile.mkdtemp(dir=MEMORY))
            drivetrain.report(
                {},
                checkpoint=make_checkpoint(place, **{f"{rank}.txt": f"{step} by {mode}"}),
                checkpoint_upload_mode=mode,
                checkpoint_dir_name=f"step_{step}",
                delete_local_checkpoint_after_upload=mode != "none",
            )

    result = runtime.fit(train, {"storage_path": str(runtime.storage_path)}, workers=3)

    modes = ("sync", "async", "none")
    assert contents(result) == [
        {f"{rank}.txt": f"{step} by {modes[(rank + step) % 3]}" for rank in range(3)} for step in range(3)
    ]
    for checkpoint, _ in result.best_checkpoints:
        listed = json.loads(Path(checkpoint.path, ".checkpoint.json").read_text())["files"]
        assert sorted(listed) == ["0.txt", "1.txt", "2.txt"]


@same_on_ray
def test_upload_in_flight_is_committed_when_its_rank_returns(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()

        def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
            wait_for_release(config["gate"])
            return make_checkpoint(run_directory(config) / name, **{f"{rank}.txt": "1"})

        drivetrain.report(
            {"rank": rank},
            checkpoint=make_checkpoint(tempfile.mkdtemp(), **{"weights.txt": "1"}),
            checkpoint_upload_mode="async",
            checkpoint_upload_fn=store,
        )
        release(config["gate"])

    result = runtime.fit(train, {"storage_path": str(runtime.storage_path), "gate": gate.path})

    assert contents(result) == [{f"{rank}.txt": "1" for rank in range(runtime.world())}]


@on_one_machine
def test_get_checkpoint_returns_the_last_reported_one_even_if_an_earlier_upload_takes_longer(
    runtime: RuntimeUnderTest,
) -> None:
    def train(config: dict) -> str:
        second_is_stored = threading.Event()

        def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
            if name == "checkpoint_000001":
                assert second_is_stored.wait(30)
            return make_checkpoint(run_directory(config) / name, **{"weights.txt": name})

        for step in range(2):
            drivetrain.report(
                {"step": step},
                checkpoint=make_checkpoint(tempfile.mkdtemp(), **{"weights.txt": "1"}),
                checkpoint_upload_mode="async" if step == 0 else "sync",
                checkpoint_upload_fn=store,
            )
        second_is_stored.set()
        wait_for_uploads()
        return Path(drivetrain.get_checkpoint().path).name

    result = runtime.fit(
        train,
        {"storage_path": str(runtime.storage_path)},
        workers=1,
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )

    assert result.return_value == "checkpoint_000002"
    assert committed_names(result.path) == directories(result.path) == ["checkpoint_000002"]


@on_one_machine
def test_upload_in_flight_at_a_failure_does_not_affect_the_next_attempt(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> bool:
        def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
            wait_for_release(config["gate"])
            return make_checkpoint(run_directory(config) / name, **{f"{drivetrain.get_context().attempt}.txt": "1"})

        first = drivetrain.get_context().attempt == 0
        place = run_directory(config) / "best"
        if not first and drivetrain.get_checkpoint() is not None:
            return place.exists()
        drivetrain.report(
            {},
            checkpoint=make_checkpoint(tempfile.mkdtemp(), **{"weights.txt": "1"}),
            checkpoint_dir_name="best",
            checkpoint_upload_mode="async" if first else "sync",
            checkpoint_upload_fn=store if first else None,
        )
        release(config["gate"])
        if first:
            raise RuntimeError("the first attempt fails")
        return True

    result = runtime.fit(
        train,
        {"storage_path": str(runtime.storage_path), "gate": gate.path},
        workers=1,
        failure_config=FailureConfig(max_failures=1),
    )

    assert result.return_value is True
    assert contents(result) in ([{"0.txt": "1"}], [{"weights.txt": "1"}]), "the checkpoint has files of both attempts"


@on_one_machine
def test_unknown_upload_mode_is_refused(runtime: RuntimeUnderTest) -> None:
    def train() -> str:
        try:
            drivetrain.report({}, make_checkpoint(tempfile.mkdtemp(), **{"a.txt": "1"}), checkpoint_upload_mode="later")
        except SessionError as error:
            return str(error)
        return ""

    assert "expected 'sync', 'async' or 'none', got 'later'" in runtime.fit(train, workers=1).return_value
