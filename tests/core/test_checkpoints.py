import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Checkpoint, CheckpointConfig, CheckpointError, StorageError
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.manifest import CheckpointManager, read_manifest
from drivetrain._storage.retention import rank_checkpoints
from drivetrain._storage.upload import put_directory
from tests.support import ROOT, local_storage


def commit(manager: CheckpointManager, storage: Storage, index: int, **metrics: float) -> CommittedCheckpoint:
    directory = Path(storage.path(f"checkpoint_{index:06d}"))
    directory.mkdir()
    (directory / "weights.txt").write_text(str(index))
    files = {0: {"weights.txt": StoredFile(len(str(index)))}}
    return manager.commit(number=index, iteration=index, files=files, metrics=metrics)


def indexes(entries: list[CommittedCheckpoint]) -> list[int]:
    return [entry.number for entry in entries]


def directories(storage: Storage) -> list[str]:
    return [name for name in storage.list_names()[0] if name.startswith("checkpoint_")]


def test_another_process_reads_the_committed_checkpoints(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage, metadata={"dataset": "digits"})
    assert manager.latest is None
    commit(manager, storage, 1, loss=0.5)
    entry = commit(manager, storage, 4, loss=0.25)

    reopened = CheckpointManager(storage)

    assert reopened.committed == manager.committed
    assert reopened.latest == entry
    assert (entry.name, entry.metrics) == ("checkpoint_000004", {"loss": 0.25})
    assert reopened.checkpoint(entry).get_metadata() == {"dataset": "digits"}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(), [1, 2, 3, 4, 5]),
        (CheckpointConfig(num_to_keep=2), [4, 5]),
        (CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score"), [2, 4, 5]),
        (CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="min"), [3, 5]),
        (CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="never reported"), [5]),
    ],
)
def test_retention_keeps_the_best_and_never_deletes_the_latest(
    tmp_path: Path, config: CheckpointConfig, kept: list[int]
) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage, config)
    for index, score in enumerate((3.0, 9.0, 1.0, 8.0, 2.0), 1):
        commit(manager, storage, index, score=score)

    manager.close()
    assert indexes(manager.committed) == indexes(read_manifest(storage)) == kept
    assert directories(storage) == [entry.name for entry in manager.committed]


def test_nan_ranks_last_and_later_checkpoints_win_ties() -> None:
    entries = [
        CommittedCheckpoint(name=str(index), number=index, iteration=index, metrics={"score": score}, time=0.0)
        for index, score in enumerate([math.nan, 1.0, 2.0, 2.0, "high"])
    ]

    assert indexes(rank_checkpoints(entries, "score", "max"))[:3] == [3, 2, 1]
    assert indexes(rank_checkpoints(entries, "score", "min"))[:3] == [1, 3, 2]


def test_sweep_deletes_only_files_that_were_never_committed(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage)
    commit(manager, storage, 1)
    for name in ("checkpoint_000002", "artifacts", "checkpoint_mine"):
        Path(storage.path(name)).mkdir()

    assert manager.sweep() == (["checkpoint_000002"], 2)
    assert storage.list_names()[0] == ["artifacts", "checkpoint_000001", "checkpoint_mine"]


def test_sweep_deletes_the_draft_of_an_announcement_that_a_killed_process_was_writing(tmp_path: Path) -> None:
    manager = CheckpointManager(local_storage(tmp_path))
    (tmp_path / ".pending").mkdir()
    draft = tmp_path / ".pending" / ".step_10.dabb6b7d"
    draft.touch()

    assert manager.leftovers() == []
    assert manager.sweep() == ([], 0)
    assert not draft.exists()


def test_rank_that_was_not_waited_for_adds_its_files_to_a_committed_checkpoint(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage)
    entry = commit(manager, storage, 1)
    Path(storage.path(entry.name, "late.txt")).write_text("late")

    assert manager.commit(number=1, iteration=1, files={1: {"late.txt": StoredFile(4)}}, metrics={}) == entry
    listing = json.loads(Path(storage.path(entry.name, ".checkpoint.json")).read_text())
    assert listing["files"] == {"late.txt": [4, None], "weights.txt": [1, None]}
    assert indexes(manager.committed) == [1]


def test_collision_commits_nothing(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage, CheckpointConfig(on_conflict="error"))
    files = {}
    for rank in range(2):
        source = tmp_path / f"of_{rank}"
        source.mkdir()
        (source / "weights.txt").write_text(f"of {rank}")
        files[rank] = put_directory(storage, str(source), "checkpoint_000001", rank=rank)

    with pytest.raises(CheckpointError, match="ranks 0 and 1"):
        manager.commit(number=1, iteration=1, files=files, metrics={})
    assert read_manifest(storage) == []


DAMAGED = [
    b"", b'{"version": 1, "check', b"[]", b'{"version": 1}', b'{"version": 1, "checkpoints": [{"name": "x"}]}', None
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_or_deleted_manifest_is_reported_and_rebuilt_from_verified_checkpoints(
    tmp_path: Path, content: bytes | None
) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage)
    entries = [commit(manager, storage, index, loss=1 / index) for index in (1, 2, 3)]
    Path(storage.path(entries[2].name, "weights.txt")).write_text("longer than it was")
    manifest = tmp_path / "manifest.json"
    if content is None:
        manifest.unlink()
    else:
        manifest.write_bytes(content)
    warnings: list[str] = []

    reopened = CheckpointManager(storage, warn=warnings.append)

    assert reopened.committed == entries[:2]
    assert str(manifest) in warnings[0]
    assert "recovered 2 checkpoints from the lists of files in their directories (newest: " in warnings[0]


def test_checkpoint_with_a_listing_is_not_committed_before_the_first_manifest_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage)
    manager.create_manifest()
    monkeypatch.setattr(manager._manifest, "replace", lambda entries: None)  # as if the driver was killed
    commit(manager, storage, 1)
    warnings: list[str] = []

    reopened = CheckpointManager(storage, warn=warnings.append)

    assert (reopened.committed, warnings) == ([], [])
    assert reopened.sweep() == (["checkpoint_000001"], 1)


@pytest.mark.parametrize("name", ["checkpoint_000001/weights.txt", "result.json", "result_rank_1.json"])
def test_run_without_a_manifest_is_damaged_unless_it_is_new(tmp_path: Path, name: str) -> None:
    storage = local_storage(tmp_path)
    for new in ("run.json", "artifacts/file", "my_checkpoint/weights.txt"):
        storage.write_bytes(new, b"{}")
    warnings: list[str] = []
    assert (read_manifest(storage, warnings.append), warnings) == ([], [])
    storage.write_bytes(name, b"{}")

    manager = CheckpointManager(storage, warn=warnings.append)
    manager.create_manifest()

    assert len(warnings) == 1
    assert "manifest.json is missing: recovered 0 checkpoints" in warnings[0]
    assert (read_manifest(storage, warnings.append), len(warnings)) == ([], 1)


def test_recovered_manifest_is_written_again(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage)
    entry = commit(manager, storage, 1)
    storage.write_bytes("manifest.json", b"{")
    CheckpointManager(storage).create_manifest()
    (tmp_path / entry.name / ".checkpoint.json").unlink()  # the manifest does not need it

    assert read_manifest(storage) == [entry]


def test_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"version": 99, "checkpoints": []}')

    with pytest.raises(StorageError, match="Upgrade drivetrain") as refused:
        CheckpointManager(local_storage(tmp_path))
    assert str(tmp_path / "manifest.json") in str(refused.value)


def test_run_resumes_from_the_newest_checkpoint_that_verifies(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage)
    entries = [commit(manager, storage, index) for index in (1, 2, 3, 4)]
    Path(storage.path(entries[3].name, "weights.txt")).unlink()
    os.truncate(storage.path(entries[2].name, "weights.txt"), 0)
    warnings: list[str] = []

    reopened = CheckpointManager(storage, warn=warnings.append)

    assert reopened.verify() == entries[1]
    assert "checkpoint_000004/weights.txt is missing" in warnings[0]
    assert "checkpoint_000003/weights.txt has 0 bytes instead of 1" in warnings[1]
    assert reopened.last_number == 4, "the number of a damaged checkpoint is not used reopened"
    assert reopened.sweep() == ([], 0), "a committed checkpoint is not an orphan, even if damaged"


COMMIT_FOR_EVER = """
import itertools, sys
from pathlib import Path
from drivetrain import CheckpointConfig
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._storage.upload import put_directory
from tests.support import local_storage

storage = local_storage(Path(sys.argv[1]))
source = Path(sys.argv[2])
manager = CheckpointManager(storage, CheckpointConfig(num_to_keep=3))
manager.sweep()
start = manager.latest.number + 1 if manager.latest else 1
for index in itertools.count(start):
    (source / "weights.txt").write_text("x" * 100_000)
    files = put_directory(storage, str(source), f"checkpoint_{index:06d}", rank=0)
    manager.commit(number=index, iteration=index, files={0: files}, metrics={"padding": "y" * 100_000})
    print(index, flush=True)
"""


def test_process_killed_at_any_point_of_a_commit_leaves_a_manifest_of_complete_checkpoints(
    tmp_path: Path,
) -> None:
    run, source = tmp_path / "run", tmp_path / "source"
    run.mkdir()
    source.mkdir()
    storage = local_storage(run)
    last = 0
    for kill_after in (1, 2, 5, 7, 11):
        with subprocess.Popen(
            [sys.executable, "-c", COMMIT_FOR_EVER, str(run), str(source)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for _ in range(kill_after):
                last = int(process.stdout.readline())
            for _ in range(300):  # while the other process commits
                assert read_manifest(storage)[-1].number >= last
            process.kill()
            process.wait()

        entries = read_manifest(storage)
        assert entries[-1].number >= last, "a committed checkpoint was lost"
        for entry in entries:
            weights = Path(storage.path(entry.name, "weights.txt"))
            assert weights.read_text() == "x" * 100_000
        CheckpointManager(storage).sweep()
        assert directories(storage) == [entry.name for entry in entries]


def test_checkpoint_is_copied_into_a_given_directory(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights.txt").write_text("1")
    checkpoint = Checkpoint(tmp_path / "made")

    copy = Path(checkpoint.to_directory(tmp_path / "copy"))
    (copy / "weights.txt").write_text("2")

    with checkpoint.as_directory() as path:
        assert Path(path, "weights.txt").read_text() == "1"
    assert checkpoint.filesystem.exists(checkpoint.path)


def test_checkpoint_metadata_is_set_updated_and_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": 2})
    checkpoint.update_metadata({"b": 3, "c": [4]})

    assert checkpoint.get_metadata() == {"a": 1, "b": 3, "c": [4]}
    with pytest.raises(CheckpointError, match="values that JSON supports"):
        checkpoint.set_metadata({"d": object()})
    assert checkpoint.get_metadata() == {"a": 1, "b": 3, "c": [4]}


def test_checkpoint_that_was_read_at_the_last_commit_is_dropped_at_the_end(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage, CheckpointConfig(num_to_keep=1))
    first = commit(manager, storage, 1)
    with manager.checkpoint(first).as_directory():
        commit(manager, storage, 2)
        assert indexes(manager.committed) == [1, 2]

    manager.close()

    assert indexes(manager.committed) == [2]
    assert directories(storage) == ["checkpoint_000002"]


def test_checkpoint_is_not_deleted_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage, CheckpointConfig(num_to_keep=1))
    checkpoint = manager.checkpoint(commit(manager, storage, 1))
    fetch = Checkpoint._fetch

    def commit_and_fetch(*arguments: Any) -> Any:
        commit(manager, storage, 2)
        return fetch(*arguments)

    monkeypatch.setattr(Checkpoint, "_fetch", commit_and_fetch)
    copy = checkpoint.to_directory(tmp_path / "copy")
    manager.close()

    assert Path(copy, "weights.txt").read_text() == "1"
    assert indexes(manager.committed) == [2]


@pytest.mark.parametrize("takes_effect", [True, False])
def test_manifest_whose_write_failed_is_read_again_before_anything_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_effect: bool
) -> None:
    storage = local_storage(tmp_path)
    manager = CheckpointManager(storage, CheckpointConfig(num_to_keep=1))
    commit(manager, storage, 1)
    write = Storage.write_bytes

    def write_and_fail(self: Storage, name: str, data: bytes, **options: Any) -> None:
        if name != "manifest.json":
            write(self, name, data, **options)
        else:
            if takes_effect:
                write(self, name, data, **options)
            raise StorageError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_bytes", write_and_fail)
        with pytest.raises(StorageError, match="lost"):
            commit(manager, storage, 2)
    kept = 2 if takes_effect else 1

    assert manager.sweep()[0] == [f"checkpoint_{3 - kept:06d}"]
    assert indexes(manager.committed) == indexes(read_manifest(storage)) == [kept]
    assert directories(storage) == [f"checkpoint_{kept:06d}"]
