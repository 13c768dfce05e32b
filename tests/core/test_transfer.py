import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    ConfigurationError,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
)
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import LocalFilesystem, StoredFile
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._storage.transfer import Job, Limits, run_jobs
from drivetrain._storage.upload import put_directory
from tests.support import PROCESS_LIMIT_S, ROOT, local_storage

GIB = 1 << 30


def commit(
    run: Path, source: Path, *, index: int = 1, config: CheckpointConfig | None = None, **options: Any
) -> Checkpoint:
    """Return the committed checkpoint of a directory's files."""
    storage = local_storage(run)
    manager = CheckpointManager(storage, config)
    checksums = manager._config.checksums
    files = put_directory(storage, str(source), f"checkpoint_{index:06d}", checksums=checksums, **options)
    return manager.checkpoint(manager.commit(number=index, iteration=index, files={0: files}, metrics={}))


def paths_in(directory: str | Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in Path(directory).rglob("*") if file.is_file())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with the files of a checkpoint."""
    directory = tmp_path / "source"
    for name in ("model/a.safetensors", "model/b.safetensors", "model/deep/c.txt", "optimizer.pt", "config.json"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"content of {name}")
    return directory


class Flaky:
    """A job that fails a number of times before it succeeds."""

    def __init__(self, error: Exception, failures: int) -> None:
        self._error = error
        self._failures = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error
        return "done"


TRANSIENT = [
    ConnectionResetError(104, "Connection reset by peer"),
    OSError(5, "Input/output error"),
    TimeoutError("timed out"),
    OSError("When reading information for key 'x': AWS Error NETWORK_CONNECTION during HeadObject operation"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("in_thread", [True, False])
def test_transient_error_is_retried(error: Exception, in_thread: bool) -> None:
    flaky = Flaky(error, failures=1)

    assert run_jobs([Job("weights", flaky)], what="upload", limits=Limits(), in_thread=in_thread) == ["done"]
    assert flaky.calls == 2


PERMANENT = [
    PermissionError(13, "Permission denied"),
    FileNotFoundError("bucket/run/weights.pt"),
    OSError(28, "No space left on device"),
    OSError("When initiating multiple part upload: AWS Error ACCESS_DENIED during CreateMultipartUpload"),
    ValueError("a bug"),
]


@pytest.mark.parametrize("error", PERMANENT, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("in_thread", [True, False])
def test_permanent_error_is_raised_at_once_and_names_the_job(error: Exception, in_thread: bool) -> None:
    flaky = Flaky(error, failures=99)

    with pytest.raises(
        StorageError, match=rf"^\[DT-406\] upload failed at weights: {type(error).__name__}: "
    ) as failed:
        run_jobs([Job("weights", flaky)], what="upload", limits=Limits(), in_thread=in_thread)
    assert flaky.calls == 1
    assert failed.value.__cause__ is error


def test_persistent_transient_error_is_raised_after_the_maximum_number_of_attempts() -> None:
    flaky = Flaky(ConnectionResetError(104, "Connection reset by peer"), failures=99)

    with pytest.raises(StorageError, match="upload failed at weights: ConnectionResetError: Connection reset by peer"):
        run_jobs([Job("weights", flaky)], what="upload", limits=Limits(attempts=3))
    assert flaky.calls == 3


def test_deadline_is_met_and_names_the_hanging_job() -> None:
    released = threading.Event()
    jobs = [Job("quick", lambda: None), Job("stuck in the network", released.wait), Job("quick", lambda: None)]
    start = time.monotonic()
    try:
        with pytest.raises(StorageError, match=r"download took longer than 2 s .*2 of 3 parts.*stuck in the net"):
            run_jobs(jobs, what="download", limits=Limits(deadline_s=2))
        assert 2 <= time.monotonic() - start < 60
    finally:
        released.set()


def test_deadline_ends_the_retries_of_a_failing_job() -> None:
    flaky = Flaky(ConnectionResetError(104, "Connection reset by peer"), failures=99)
    start = time.monotonic()

    with pytest.raises(StorageError, match="Connection reset by peer"):
        run_jobs([Job("weights", flaky)], what="upload", limits=Limits(deadline_s=3))
    assert time.monotonic() - start < 60


def test_job_that_exits_fails_the_transfer() -> None:
    jobs = [Job("weights", lambda: sys.exit("no such bucket")), Job("vocabulary", lambda: None)]
    with pytest.raises(StorageError, match=r"upload failed at weights: .*no such bucket"):
        run_jobs(jobs, what="upload", limits=Limits(deadline_s=600))


def test_results_have_the_order_of_the_jobs_and_the_number_of_threads_is_limited() -> None:
    together = threading.Barrier(3)
    lock = threading.Lock()
    working = maximum = 0

    def work(number: int) -> int:
        nonlocal working, maximum
        with lock:
            working += 1
            maximum = max(maximum, working)
        together.wait(30)
        with lock:
            working -= 1
        return number

    jobs = [Job(str(number), lambda number=number: work(number)) for number in range(30)]  # type: ignore[misc]
    assert run_jobs(jobs, what="upload", limits=Limits(threads=3)) == list(range(30))
    assert maximum == 3


def test_no_job_is_started_after_a_failure() -> None:
    started = []

    def work(number: int) -> None:
        started.append(number)
        if number == 2:
            raise ValueError("a bug")

    jobs = [Job(str(number), lambda number=number: work(number)) for number in range(1000)]  # type: ignore[misc]
    for in_thread in (True, False):
        started.clear()
        with pytest.raises(StorageError, match="upload failed at 2"):
            run_jobs(jobs, what="upload", limits=Limits(threads=1), in_thread=in_thread)
        assert len(started) < 1000


@pytest.mark.parametrize(
    ("patterns", "copied"),
    [
        ({}, ["config.json", "model/a.safetensors", "model/b.safetensors", "model/deep/c.txt", "optimizer.pt"]),
        ({"include": ["*.safetensors"]}, ["model/a.safetensors", "model/b.safetensors"]),
        ({"include": ["model"]}, ["model/a.safetensors", "model/b.safetensors", "model/deep/c.txt"]),
        ({"include": ["model/"], "exclude": ["model/deep"]}, ["model/a.safetensors", "model/b.safetensors"]),
        ({"include": ["*/deep"]}, ["model/deep/c.txt"]),
        ({"exclude": ["*.pt", "model"]}, ["config.json"]),
        ({"include": ["config.json", "optim?zer.pt"]}, ["config.json", "optimizer.pt"]),
        ({"include": ["model"], "exclude": ["*/[b-z]*"]}, ["model/a.safetensors"]),
    ],
)
def test_part_of_a_checkpoint_is_copied(tmp_path: Path, source: Path, patterns: Any, copied: list[str]) -> None:
    checkpoint = commit(tmp_path / "run", source)

    target = checkpoint.to_directory(tmp_path / "copy", **patterns)

    assert paths_in(target) == copied
    for name in copied:
        assert Path(target, name).read_text() == f"content of {name}"


def test_patterns_that_match_no_file_are_refused(tmp_path: Path, source: Path) -> None:
    checkpoint = commit(tmp_path / "run", source)

    with pytest.raises(CheckpointError, match=r"no file of .* matches include=\['\*\.bin'\]"):
        checkpoint.to_directory(tmp_path / "copy", include=["*.bin"])
    with pytest.raises(CheckpointError, match=r"expected a list of patterns, got '\*\.bin'"):
        checkpoint.to_directory(tmp_path / "copy", include="*.bin")


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("given_away", [False, True])
def test_flipped_byte_is_detected_by_the_recorded_checksums(tmp_path: Path, source: Path, given_away: bool) -> None:
    checkpoint = commit(tmp_path / "run", source, config=CheckpointConfig(checksums=True), may_move=given_away)
    checkpoint.verify(checksums=True)
    assert source.exists() != given_away

    flip_a_byte(Path(checkpoint.path, "optimizer.pt"))

    checkpoint.verify()
    with pytest.raises(CheckpointError, match=r"checkpoint_000001/optimizer\.pt has other content than was stored"):
        checkpoint.verify(checksums=True)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is damaged.* Use another checkpoint"):
        checkpoint.to_directory(tmp_path / "copy")
    assert paths_in(checkpoint.to_directory(tmp_path / "part", exclude=["*.pt"])) == [
        "config.json", "model/a.safetensors", "model/b.safetensors", "model/deep/c.txt"
    ]  # fmt: skip


def truncate_it(file: Path) -> None:
    os.truncate(file, 5)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncate_it, "has 5 bytes instead of 23"), (os.unlink, "is missing")],
    ids=["short", "deleted"],
)
def test_truncated_or_deleted_file_is_detected(
    tmp_path: Path, source: Path, damage: Callable[[Path], None], reason: str
) -> None:
    checkpoint = commit(tmp_path / "run", source)
    damage(Path(checkpoint.path, "optimizer.pt"))

    with pytest.raises(CheckpointError, match=rf"checkpoint_000001/optimizer\.pt {reason}"):
        checkpoint.verify()
    with pytest.raises(CheckpointError, match=r"checkpoint_000001/optimizer\.pt .*Use another checkpoint"):
        checkpoint.to_directory(tmp_path / "copy")
    assert "config.json" in paths_in(checkpoint.to_directory(tmp_path / "part", include=["*.json", "model"]))
    with pytest.raises(CheckpointError, match=r"expected a committed checkpoint, got .* without a \.checkpoint\.json"):
        Checkpoint(source).verify()


def test_links_to_files_are_stored_as_the_files(tmp_path: Path, source: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("from outside")
    (source / "absolute.txt").symlink_to(outside)
    (source / "model" / "relative.txt").symlink_to("../../outside.txt")

    checkpoint = commit(tmp_path / "run", source)
    outside.write_text("changed")

    for name in ("absolute.txt", "model/relative.txt"):
        stored = Path(checkpoint.path, name)
        assert not stored.is_symlink()
        assert stored.read_text() == "from outside"
    checkpoint.verify()


def test_sparse_file_is_stored_and_loaded_without_its_holes_being_filled(tmp_path: Path, source: Path) -> None:
    """Store 5 GiB of which three pages are data."""
    with (source / "sparse.bin").open("wb") as file:
        for position in (0, 3 * GIB + 12345, 5 * GIB - 4):
            file.seek(position)
            file.write(b"data")
    if (source / "sparse.bin").stat().st_blocks * 512 > GIB:
        pytest.skip("the filesystem of the temporary directory has no sparse files")

    checkpoint = commit(tmp_path / "run", source)
    copy = checkpoint.to_directory(tmp_path / "copy")

    for directory in (checkpoint.path, copy):
        status = Path(directory, "sparse.bin").stat()
        assert status.st_size == 5 * GIB
        assert status.st_blocks * 512 < 1 << 20
        with Path(directory, "sparse.bin").open("rb") as file:
            for position in (0, 3 * GIB + 12345, 5 * GIB - 4):
                file.seek(position)
                assert file.read(4) == b"data"
    checkpoint.verify()


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.campaign), 8])
def test_ten_thousand_small_files_are_stored_checked_and_loaded(tmp_path: Path, threads: int) -> None:
    source = tmp_path / "source"
    for number in range(10_000):
        if number % 100 == 0:
            (source / f"{number // 100}").mkdir(parents=True)
        (source / f"{number // 100}" / f"{number}.txt").write_text(str(number))
    storage = Storage(LocalFilesystem(), str(tmp_path / "run"), Limits(threads=threads))
    manager = CheckpointManager(storage)

    files = put_directory(storage, str(source), "checkpoint_000001")
    checkpoint = manager.checkpoint(manager.commit(number=1, iteration=1, files={0: files}, metrics={}))

    checkpoint.verify()
    copy = checkpoint.to_directory(tmp_path / "copy")
    assert len(files) == len(paths_in(copy)) == 10_000
    assert all(Path(copy, f"{number // 100}/{number}.txt").read_text() == str(number) for number in range(10_000))
    (Path(checkpoint.path) / "77" / "7777.txt").unlink()
    with pytest.raises(CheckpointError, match=r"77/7777\.txt is missing"):
        checkpoint.verify()


def test_files_of_the_other_ranks_are_kept_when_one_rank_withdraws(tmp_path: Path, source: Path) -> None:
    storage = local_storage(tmp_path / "run")
    put_directory(storage, str(source), "checkpoint_000001", rank=0)
    files = put_directory(storage, str(source), "checkpoint_000001", rank=1)
    for name in files:  # as rank 0 does when the disk is full before its last file
        Path(storage.path("checkpoint_000001", name)).unlink()

    manager = CheckpointManager(storage)
    checkpoint = manager.checkpoint(manager.commit(number=1, iteration=1, files={1: files}, metrics={}))

    checkpoint.verify()
    assert not Path(checkpoint.path, ".rank_1").exists()
    assert Path(checkpoint.path, "model/deep/c.txt").read_text() == "content of model/deep/c.txt"


def run_in_mount_namespace(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script in its own mount namespace, and return its JSON output."""
    finished = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        cwd=ROOT,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="a small or read-only filesystem requires a mount"
)

DISK = """
import json, os, subprocess, sys, tempfile
from pathlib import Path
import drivetrain
from drivetrain import *

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "none", str(disk)], check=True)

def make(directory, mib):
    for name in ("first.bin", "second.bin"):
        with Path(directory, name).open("wb") as file:
            for part in range(mib):
                file.write(bytes([65 + part % 26]) * (1 << 20))
    return Checkpoint(directory)

def fit(function, **options):
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=disk / "runs", verbose=0, **options),
    ).fit()
"""

FULL_DISK = (
    "SIZE_MIB = 300\n"
    + DISK
    + """
filler = disk / "filler"

def train():
    messages = []
    with tempfile.TemporaryDirectory() as directory:
        drivetrain.report({"step": 0}, checkpoint=make(directory, 1))
        checkpoint = make(directory, 40)
        filler.write_bytes(b"x" * (230 << 20))
        try:
            drivetrain.report({"step": 1}, checkpoint=checkpoint)
        except StorageError as error:
            messages.append(str(error))
        left = [str(file) for file in (disk / "runs/run/checkpoint_000002").rglob("*") if file.is_file()]
        filler.unlink()
        drivetrain.report({"step": 1}, checkpoint=checkpoint)
        with drivetrain.get_checkpoint().as_directory() as stored:
            whole = [Path(stored, name).read_bytes() == Path(directory, name).read_bytes() for name in
                     ("first.bin", "second.bin")]
        filler.write_bytes(b"x" * (190 << 20))
        drivetrain.report({"step": 2}, checkpoint=checkpoint)
    return messages, left, whole

try:
    fit(train, checkpoint_config=CheckpointConfig(num_to_keep=1))
except TrainingFailedError as error:
    failed = [str(error), error.kind.value, type(error.__cause__).__name__]
filler.unlink()
result = Result.from_path(disk / "runs/run")
committed = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
result.checkpoint.verify()
size = sum(file.stat().st_size for file in (disk / "runs/run").rglob("*") if file.is_file()) >> 20
result = fit(lambda: Path(drivetrain.get_checkpoint().path).name, resume="must")
print(json.dumps({"failed": failed, "committed": committed, "continued": result.return_value, "size_mib": size}))
"""
)


@needs_mounts
def test_full_disk_fails_the_run_with_a_remedy_and_keeps_the_latest_commit(tmp_path: Path) -> None:
    results = run_in_mount_namespace(FULL_DISK, tmp_path)

    message, kind, cause = results["failed"]
    assert (
        "No space left on device. Free disk space, or keep fewer checkpoints (CheckpointConfig.num_to_keep)" in message
    )
    assert (kind, cause) == ("storage", "StorageError")
    assert [Path(path).name for path in results["committed"]] == ["checkpoint_000002"]
    assert results["continued"] == "checkpoint_000002"
    assert results["size_mib"] <= 81, "files of the failed upload still take space"


REPEATED = FULL_DISK.replace(
    """        filler.write_bytes(b"x" * (190 << 20))
        drivetrain.report({"step": 2}, checkpoint=checkpoint)
""",
    "",
).partition("\ntry:\n")[0] + (
    """
result = fit(train)
messages, left, whole = result.return_value
listed = json.loads(Path(result.checkpoint.path, ".checkpoint.json").read_text())["files"]
result.checkpoint.verify()
entries = sorted(os.listdir(result.checkpoint.path))
print(json.dumps({"messages": messages, "left": left, "whole": whole, "listed": listed, "entries": entries}))
"""
)


@needs_mounts
def test_repeated_report_stores_the_whole_checkpoint_once_there_is_space(tmp_path: Path) -> None:
    results = run_in_mount_namespace(REPEATED, tmp_path)

    (message,) = results["messages"]
    assert "No space left on device. Free disk space" in message
    assert results["left"] == []
    assert results["whole"] == [True, True]
    assert results["listed"] == {name: [40 << 20, None] for name in ("first.bin", "second.bin")}
    assert results["entries"] == [".checkpoint.json", "first.bin", "second.bin"]


READ_ONLY = (
    "SIZE_MIB = 100\n"
    + DISK
    + """
def make_read_only():  # also for files open for writing, as the kernel does after a disk error
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)

def train():
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make(directory, 1)
        drivetrain.report({"step": 0}, checkpoint=checkpoint)
        make_read_only()
        drivetrain.report({"step": 1}, checkpoint=checkpoint)

try:
    fit(train)
except TrainingFailedError as error:
    failed = [str(error), error.kind.value, type(error.__cause__).__name__]
try:
    fit(train, resume="must")
except StorageError as error:
    refused = str(error)
subprocess.run(["umount", str(disk)], check=True)
Result.from_path(disk / "runs/run").checkpoint.verify()
result = fit(lambda: Path(drivetrain.get_checkpoint().path).name, resume="must")
print(json.dumps({"failed": failed, "refused": refused, "continued": result.return_value}))
"""
)


@needs_mounts
def test_disk_that_becomes_read_only_fails_the_run_clearly_and_keeps_the_latest_commit(tmp_path: Path) -> None:
    results = run_in_mount_namespace(READ_ONLY, tmp_path)

    message, kind, cause = results["failed"]
    assert "Read-only file system. Mount the filesystem read-write, or choose another storage_path" in message
    assert (kind, cause) == ("storage", "StorageError")
    assert f"the run directory {tmp_path}/runs/run cannot be written" in results["refused"]
    assert "Read-only file system" in results["refused"]
    assert results["continued"] == "checkpoint_000001"


def fit_in_memory(function: Callable[..., Any], **options: Any) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(**{"name": "run", "verbose": 0, **options}),
    ).fit()


@pytest.mark.parametrize("uri", ["memory://{}", "memory:///{}/deep"])
def test_run_lives_in_memory_and_is_resumed_restored_and_read_there(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = uri.format(f"{tmp_path.name}-{uri.count('/')}")

    def train(config: dict[str, Any]) -> int:
        checkpoint = drivetrain.get_checkpoint()
        start = 0
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                start = int(Path(directory, "step.txt").read_text())
        for step in range(start, start + 2):
            (tmp_path / "made").mkdir(exist_ok=True)
            (tmp_path / "made" / "step.txt").write_text(str(step + 1))
            drivetrain.report({"step": step}, Checkpoint(tmp_path / "made"), checkpoint_upload_mode="async")
        return start

    rules = CheckpointConfig(num_to_keep=1)
    assert fit_in_memory(train, storage_path=path, checkpoint_config=rules).return_value == 0
    result = fit_in_memory(train, storage_path=path, resume="must", checkpoint_config=rules)
    assert result.return_value == 2
    assert DataParallelTrainer.can_restore(f"{path}/run")
    assert DataParallelTrainer.restore(f"{path}/run").fit().return_value == 4

    read = Result.from_path(f"{path}/run")
    assert (read.metrics["step"], read.metrics["_training_iteration"]) == (5, 6)
    ((checkpoint, metrics),) = read.best_checkpoints
    assert metrics["step"] == 5
    checkpoint.verify()
    assert not checkpoint.is_local
    assert paths_in(checkpoint.to_directory(tmp_path / "copy")) == ["step.txt"]
    checkpoint.filesystem.pipe_file(f"{checkpoint.path}/step.txt", b"7")
    with pytest.raises(CheckpointError, match=r"step\.txt is damaged"), checkpoint.as_directory():
        pass
    checkpoint.filesystem.rm_file(f"{checkpoint.path}/step.txt")
    with pytest.raises(CheckpointError, match=r"step\.txt is missing"), checkpoint.as_directory():
        pass
    assert sorted(os.listdir(tmp_path)) == ["copy", "made"], "files were written to a directory of that name"


def test_memory_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigurationError, match=r"expected a bucket or directory after memory://, got 'memory://'"):
        fit_in_memory(lambda: None, storage_path="memory://")
    assert os.listdir(tmp_path) == []


def test_stored_files_are_listed_with_sizes_and_checksums(tmp_path: Path, source: Path) -> None:
    storage = local_storage(tmp_path / "run")
    (source / "empty.txt").touch()

    plain = put_directory(storage, str(source), "plain")
    checked = put_directory(storage, str(source), "checked", checksums=True)
    moved = put_directory(storage, str(source), "moved", checksums=True, may_move=True)

    assert plain["optimizer.pt"] == StoredFile(23, None)
    assert checked == moved
    assert checked["empty.txt"] == StoredFile(0, 0)
    assert {name: facts.size for name, facts in checked.items()} == {name: facts.size for name, facts in plain.items()}
    assert all(facts.crc32 is not None for facts in checked.values())


def test_transfer_does_not_change_the_random_numbers_of_the_train_function() -> None:
    state = random.getstate()
    run_jobs([Job("job", lambda: None)], what="test", limits=Limits())
    assert random.getstate() == state
