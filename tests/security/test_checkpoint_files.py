"""The files of a checkpoint: links, named pipes and locks in stored checkpoints, and links in reported ones."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointError,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
)
from drivetrain._storage import holds
from drivetrain._storage.directory import Storage
from drivetrain._storage.holds import delete_unless_held
from drivetrain._storage.remote import locate
from drivetrain._storage.upload import put_directory
from drivetrain_interactive._dicts import DICT_FILE, dump, load
from tests.security.conftest import Command
from tests.support import local_storage

pytestmark = pytest.mark.timeout(60)

NEWEST = "checkpoint_000003"


def move_and_link(path: Path) -> Path:
    """Replaces a file or a directory by a link to it, and returns its new place."""
    outside = path.parents[2] / f"outside_{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)
    return outside


@pytest.mark.parametrize("name", [NEWEST, f"{NEWEST}/sub"])
def test_link_in_a_checkpoint_is_named_and_refused(place: Path, command: Command, name: str) -> None:
    run = place / "hostile"
    listing = json.loads((run / NEWEST / ".checkpoint.json").read_text())
    (run / NEWEST / "sub").mkdir()
    (run / NEWEST / "sub" / "more").write_text("m")
    listing["files"]["sub/more"] = [1, None]
    (run / NEWEST / ".checkpoint.json").write_text(json.dumps(listing))
    assert command("checkpoints", "verify", run)[0] == 0

    move_and_link(run / name)

    status, out, _ = command("checkpoints", "verify", run)
    assert status == 1
    assert out.splitlines()[0].split() == ["checkpoint_000001", "ok"]
    assert f"{run / name}" in out
    assert "symbolic link" in out
    assert "missing" not in out
    status, _, err = command("checkpoints", "export", run, "latest", place / "export")
    assert status == 1
    assert f"{run / name}" in err
    assert "symbolic link" in err


def test_link_in_the_place_of_a_checkpoint_does_not_hide_the_others_in_the_list(place: Path, command: Command) -> None:
    move_and_link(place / "hostile" / NEWEST)
    status, out, _ = command("checkpoints", "list", place / "hostile")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["checkpoint_000001", "checkpoint_000002", NEWEST]
    assert f"{NEWEST}: [DT-413] {place / 'hostile' / NEWEST}: expected a directory, got a symbolic link" in out
    rows = json.loads(command("checkpoints", "list", place / "hostile", "--json")[1])
    assert [bool(row["damage"]) for row in rows] == [False, False, True]


def test_link_without_a_target_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").symlink_to("nothing")
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="which is a symbolic link without a target"), checkpoint.as_directory():
        pass


def test_entries_of_a_checkpoint_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_text("content")
    (source / "data").symlink_to(tmp_path)
    (source / "lost").symlink_to("nothing")
    os.mkfifo(source / "pipe")
    with pytest.warns(UserWarning, match=r"DT-416.*are not stored: 'data', 'lost', 'pipe'\. Copy"):
        stored = put_directory(local_storage(tmp_path / "run"), str(source), "checkpoint")
    assert stored.keys() == {"weights"}


class OpensAMissingFile:
    def __reduce__(self) -> tuple[object, ...]:
        return open, ("/nonexistent/file",)


def test_missing_file_of_an_object_in_a_checkpoint_is_not_an_error_about_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / DICT_FILE).write_bytes(dump({"file": OpensAMissingFile()}))
    with pytest.raises(FileNotFoundError, match="/nonexistent/file"):
        load(Checkpoint(tmp_path), "load_checkpoint()", "get_checkpoint()")


@contextlib.contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    """Holds a lock as another process would."""
    with path.open("rb") as file:
        fcntl.flock(file, kind)
        yield


def test_read_of_a_checkpoint_does_not_wait_for_a_foreign_lock_forever(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "_HOLD_WAIT_S", 0.2)
    listing = place / "hostile" / NEWEST / ".checkpoint.json"
    checkpoint = Checkpoint(place / "hostile" / NEWEST)
    with locked(listing, fcntl.LOCK_EX):
        expected = rf"{listing}: expected to get a shared lock within 0.2 s, but another process holds an exclusive one"
        with pytest.raises(StorageError, match=expected), checkpoint.as_directory():
            pass
    with locked(listing, fcntl.LOCK_SH), checkpoint.as_directory() as directory:
        assert Path(directory, "weights").exists()


def test_checkpoint_that_another_process_reads_is_not_deleted(place: Path) -> None:
    storage = local_storage(place / "hostile")
    with locked(place / "hostile" / NEWEST / ".checkpoint.json", fcntl.LOCK_SH):
        assert not delete_unless_held(storage, NEWEST)
    assert delete_unless_held(storage, NEWEST)


def link_to_file(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_sparse(path: Path) -> None:
    os.truncate(path, 1 << 42)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (link_to_file, "expected a regular file, got a symbolic link"),
        (make_fifo, "expected a regular file, got a named pipe"),
        (make_sparse, r"expected a file of at most [\d,]+ bytes, got 4,398,046,511,104 bytes"),
    ],
)
def test_values_of_a_checkpoint_are_read_from_a_regular_file_only(
    tmp_path: Path, change: Callable[[Path], None], expected: str
) -> None:
    file = tmp_path / DICT_FILE
    file.write_bytes(dump({"epoch": 3}))
    assert load(Checkpoint(tmp_path), "load_checkpoint()", "get_checkpoint()") == {"epoch": 3}
    change(file)
    with pytest.raises(StorageError, match=rf"{DICT_FILE}: {expected}"):
        load(Checkpoint(tmp_path), "load_checkpoint()", "get_checkpoint()")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (link_to_file, "expected a regular file, got a symbolic link"),
        (make_fifo, "expected a regular file, got a named pipe"),
        (make_sparse, "expected a file of at most 1,073,741,824 bytes"),
        (lambda path: path.write_text("[" * 200_000), "expected JSON"),
    ],
)
def test_evaluations_of_a_model_are_read_from_a_regular_file_only(
    tmp_path: Path, change: Callable[[Path], None], expected: str
) -> None:
    reporting = pytest.importorskip("drivetrain_gbdt._reporting")
    assert reporting.evaluations(Checkpoint(tmp_path)) is None
    file = tmp_path / "evaluations.json"
    file.write_text('{"train": {"rmse": [0.5]}}')
    assert reporting.evaluations(Checkpoint(tmp_path)) == {"train": {"rmse": [0.5]}}
    change(file)
    with pytest.raises(StorageError, match=rf"evaluations\.json: {expected}"):
        reporting.evaluations(Checkpoint(tmp_path))


def test_model_may_be_a_link_but_not_a_named_pipe(tmp_path: Path) -> None:
    reporting = pytest.importorskip("drivetrain_gbdt._reporting")
    (tmp_path / "blob").write_text("model")
    (tmp_path / "model.ubj").symlink_to("blob")
    assert reporting.model_file(Checkpoint(tmp_path), "model.ubj", str(tmp_path)).read_text() == "model"
    make_fifo(tmp_path / "model.ubj")
    with pytest.raises(CheckpointError, match=r"model\.ubj: expected a regular file"):
        reporting.model_file(Checkpoint(tmp_path), "model.ubj", str(tmp_path))


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A directory like a snapshot in the cache of the Hugging Face Hub: its files are links into a store of blobs."""
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    directory = tmp_path / "models--org--name" / "snapshots" / "revision"
    (directory / "onnx").mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors", "onnx/model.onnx")):
        (blobs / f"hash{number}").write_text(name)
        (directory / name).symlink_to(os.path.relpath(blobs / f"hash{number}", (directory / name).parent))
    return directory


def assert_resolved(snapshot: Path, checkpoint: Path) -> None:
    names = {str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()}
    assert {name: (checkpoint / name).read_text() for name in names} == {name: name for name in names}
    assert not [path for path in checkpoint.rglob("*") if path.is_symlink()]
    assert len(list((snapshot.parents[1] / "blobs").iterdir())) == len(names), "the originals are kept"
    assert all((snapshot / name).is_symlink() for name in names)


@pytest.mark.parametrize("delete_local", [False, True])
def test_links_to_files_in_a_reported_directory_are_stored_as_files(
    snapshot: Path, tmp_path: Path, delete_local: bool
) -> None:
    source = tmp_path / "source"
    shutil.copytree(snapshot, source, symlinks=True)
    for path in source.rglob("*"):
        if path.is_symlink():
            target = (snapshot / path.relative_to(source)).resolve()
            path.unlink()
            path.symlink_to(target)
    DataParallelTrainer(
        lambda: drivetrain.report({}, Checkpoint(source), delete_local_checkpoint_after_upload=delete_local),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(tmp_path / "runs"), verbose=0),
    ).fit()
    checkpoint = Result.from_path(tmp_path / "runs" / "run").checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert_resolved(snapshot, Path(checkpoint.path))


def test_links_to_files_in_a_reported_directory_are_resolved_for_a_bucket(snapshot: Path, tmp_path: Path) -> None:
    storage = Storage(*locate("memory://links/run", what="the test"))
    try:
        stored = put_directory(storage, str(snapshot), "checkpoint_000001")
        assert {name: facts.size for name, facts in stored.items()} == {name: len(name) for name in stored}
        storage.get_directory("checkpoint_000001", str(tmp_path / "download"), files=stored)
        assert_resolved(snapshot, tmp_path / "download")
    finally:
        storage.filesystem.delete(storage.root)
