import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from drivetrain import CheckpointError, ConfigurationError, Result, StorageError
from drivetrain._storage.directory import Storage, open_storage, runs_location
from drivetrain._storage.duplicates import settle_duplicates
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.upload import put_directory
from tests.support import local_storage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with the files of a checkpoint."""
    directory = tmp_path / "source"
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "a.txt").write_text("a")
    (directory / "deep" / "er" / "b.txt").write_text("bb")
    return directory


def test_file_is_replaced_atomically_and_leaves_no_draft(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    storage.write_bytes("deep/file.json", b"one")
    storage.write_bytes("deep/file.json", b"two")

    assert storage.read_bytes("deep/file.json") == b"two"
    assert os.listdir(tmp_path / "deep") == ["file.json"]
    assert storage.read_bytes("missing") is None


def test_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    (tmp_path / "taken").mkdir()

    with pytest.raises(StorageError, match=r"cannot write taken"):
        storage.write_bytes("taken", b"data")
    assert os.listdir(tmp_path) == ["taken"]


def test_stored_directory_lists_its_file_sizes(tmp_path: Path, source: Path) -> None:
    storage = local_storage(tmp_path / "run")

    assert put_directory(storage, str(source), "checkpoint", rank=0) == {
        "a.txt": StoredFile(1),
        "deep/er/b.txt": StoredFile(2),
    }
    assert Path(storage.path("checkpoint", "deep", "er", "b.txt")).read_text() == "bb"


def test_same_content_of_several_ranks_becomes_one_file(tmp_path: Path, source: Path) -> None:
    storage = local_storage(tmp_path / "run")
    files = {rank: put_directory(storage, str(source), "checkpoint", rank=rank) for rank in range(3)}

    settle_duplicates(storage, "checkpoint", files)

    assert sorted(os.listdir(storage.path("checkpoint"))) == ["a.txt", "deep"]


def store_of_ranks(storage: Storage, source: Path, ranks: Sequence[int]) -> dict[int, dict[str, StoredFile]]:
    """Store a file of the same name from several ranks, in this order."""
    files = {}
    for rank in ranks:
        (source / "a.txt").write_text(f"of rank {rank}" * (rank + 1))
        files[rank] = put_directory(storage, str(source), "checkpoint", rank=rank)
    return files


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_file_of_the_lowest_rank_is_kept_whichever_rank_is_faster(
    tmp_path: Path, source: Path, order: Sequence[int]
) -> None:
    storage = local_storage(tmp_path / "run")
    files = store_of_ranks(storage, source, order)

    merged, conflicts = settle_duplicates(storage, "checkpoint", files)

    assert Path(storage.path("checkpoint", "a.txt")).read_text() == "of rank 0"
    assert sorted(os.listdir(storage.path("checkpoint"))) == ["a.txt", "deep"]
    assert merged == {"a.txt": StoredFile(9), "deep/er/b.txt": StoredFile(2)}
    assert conflicts == {"a.txt": [0, 1, 2], "deep/er/b.txt": [0, 1, 2]}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_files_of_all_ranks_are_kept_in_directories_of_the_ranks(
    tmp_path: Path, source: Path, order: Sequence[int]
) -> None:
    storage = local_storage(tmp_path / "run")
    files = store_of_ranks(storage, source, order)

    merged, _ = settle_duplicates(storage, "checkpoint", files, on_conflict="keep_all")

    for rank, path in enumerate(["a.txt", "rank_1/a.txt", "rank_2/a.txt"]):
        assert Path(storage.path("checkpoint", path)).read_text() == f"of rank {rank}" * (rank + 1)
    assert storage.walk("checkpoint") == {path: facts.size for path, facts in merged.items()}


def test_late_rank_does_not_replace_a_committed_file(tmp_path: Path, source: Path) -> None:
    storage = local_storage(tmp_path / "run")
    committed, _ = settle_duplicates(storage, "checkpoint", store_of_ranks(storage, source, [1]))

    merged, conflicts = settle_duplicates(
        storage, "checkpoint", store_of_ranks(storage, source, [0]), committed=committed
    )

    assert merged == committed
    assert Path(storage.path("checkpoint", "a.txt")).read_text() == "of rank 1" * 2
    assert conflicts.keys() == committed.keys()


@pytest.mark.parametrize("content", ["b", "longer"])
def test_different_content_of_two_ranks_is_refused_with_both_named(tmp_path: Path, source: Path, content: str) -> None:
    storage = local_storage(tmp_path / "run")
    files = {0: put_directory(storage, str(source), "checkpoint", rank=0)}
    (source / "a.txt").write_text(content)
    files[2] = put_directory(storage, str(source), "checkpoint", rank=2)

    with pytest.raises(CheckpointError, match=r"ranks 0 and 2 reported 'a\.txt'"):
        settle_duplicates(storage, "checkpoint", files, on_conflict="error")


@pytest.mark.parametrize("deleted", ["a.txt", "deep"])
def test_file_that_vanishes_during_the_copy_is_named(
    tmp_path: Path, source: Path, deleted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clean_up(point: str) -> None:
        """Delete a file at the point at which the crash tests kill the process."""
        if point == "before upload":
            (source / "a.txt").unlink() if deleted == "a.txt" else shutil.rmtree(source / "deep")

    monkeypatch.setattr("drivetrain._storage.upload.reach", clean_up)
    with pytest.raises(
        CheckpointError, match=r"\[DT-425\].*the directory not to change during report\(\), but '"
    ) as gone:
        put_directory(local_storage(tmp_path / "run"), str(source), "checkpoint", rank=0)
    assert deleted in str(gone.value)


def test_missing_home_directory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("DRIVETRAIN_STORAGE_PATH", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # the user has no entry
    with pytest.raises(ConfigurationError, match=r"\[DT-426\] storage_path: .* HOME is not set"):
        runs_location(None)


def test_directory_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    storage = local_storage(tmp_path / "run")

    with pytest.raises(CheckpointError, match="at least one file, got an empty directory"):
        put_directory(storage, str(tmp_path / "empty"), "checkpoint", rank=0)
    with pytest.raises(CheckpointError, match="expected the checkpoint's directory, which does not exist"):
        put_directory(storage, str(tmp_path / "missing"), "checkpoint", rank=0)


def test_delete_accepts_files_trees_links_and_missing_paths(tmp_path: Path, source: Path) -> None:
    storage = local_storage(tmp_path)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").write_text("")

    for name in ("link", "file", "missing"):
        storage.delete(name)
    assert source.is_dir()
    storage.delete("source")
    assert os.listdir(tmp_path) == []


def test_storage_that_another_node_does_not_share_is_detected(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    with pytest.raises(StorageError, match="Set a storage_path that all nodes share"):
        storage.require_run("0123abcd")
    storage.write_bytes("run.json", b'{"id": "0123abcd"}')
    storage.require_run("0123abcd")
    with pytest.raises(StorageError, match="Set a storage_path that all nodes share"):
        storage.require_run("another")


def test_run_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match="expected directories above the run directory, got a file"):
        open_storage(local_storage(tmp_path / "file" / "run"))


def test_storage_path_comes_from_the_argument_the_variable_or_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DRIVETRAIN_STORAGE_PATH", raising=False)
    assert runs_location(None).root == str(tmp_path / "drivetrain_results")
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path / "variable"))
    assert runs_location(None).root == str(tmp_path / "variable")
    assert runs_location("~/mine").root == str(tmp_path / "mine")
    assert runs_location(f"file://{tmp_path}").root == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert runs_location("relative").root == str(tmp_path / "relative")
    with pytest.raises(ConfigurationError, match="storage_filesystem"):
        runs_location(tmp_path, object())


def test_result_of_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a run directory with run\.json"):
        Result.from_path(tmp_path)
