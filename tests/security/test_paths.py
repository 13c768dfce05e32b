"""Hostile run directories: no operation on them writes, moves or deletes anything outside of them."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    DrivetrainError,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
)
from drivetrain._storage.checkpoint import checkpoint_in, parse_listing
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import require_checkpoint_name
from drivetrain._storage.manifest import delete_checkpoints, read_manifest
from drivetrain._storage.node import share_directory
from drivetrain._storage.remote import locate
from drivetrain._storage.upload import put_directory
from drivetrain_console import main
from tests.support import local_storage

Attack = Callable[[Path, Path], None]
ATTACKS: dict[str, Attack] = {}


def train(config: dict[str, Any]) -> None:
    """Reports checkpoints, one of them with a name, and writes an artifact."""
    place = Path(config["directory"])
    for name in (None, "best", None):
        shutil.rmtree(place, ignore_errors=True)
        (place / "sub").mkdir(parents=True)
        (place / "weights.txt").write_text("new")
        (place / "sub" / "more.txt").write_text("new")
        with contextlib.suppress(DrivetrainError):  # the second run reports "best" again
            drivetrain.report({"loss": 0.5}, checkpoint=Checkpoint(place), checkpoint_dir_name=name)
    Path(drivetrain.get_context().get_trial_dir(), "artifact.txt").write_text("new")


def trainer(run: RunConfig, directory: Path) -> DataParallelTrainer:
    scaling = ScalingConfig(num_workers=0)
    config = {"directory": str(directory)}
    return DataParallelTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, which every test copies."""
    directory = tmp_path_factory.mktemp("finished")
    trainer(RunConfig(name="run", storage_path=str(directory), verbose=0), directory / "reported").fit()
    return directory / "run"


def contents(directory: Path) -> dict[str, tuple[int, object]]:
    """Everything under a directory, links and directories included, with its mode and its content or target."""
    found: dict[str, tuple[int, object]] = {}
    for path in sorted(directory.rglob("*")):
        content: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(directory))] = path.lstat().st_mode, content
    return found


class Scene:
    """A run directory, and next to it the tree that must not change."""

    def __init__(self, directory: Path, finished_run: Path) -> None:
        self.directory = directory
        self.outside = directory / "outside"
        self.run = directory / "runs" / "run"
        for name in ("file.json", "rank_0.log", "sub/more.txt", ".checkpoint.json", "checkpoint_000009/file.txt"):
            file = self.outside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text('{"_training_iteration": 99}\n' * 3)
        shutil.copytree(finished_run, self.run)
        self.before = contents(self.outside)

    def assert_nothing_outside_changed(self) -> None:
        assert contents(self.outside) == self.before
        assert set(os.listdir(self.directory)) <= {"outside", "runs", "reported", "export"}


@pytest.fixture
def scene(tmp_path: Path, finished_run: Path) -> Scene:
    return Scene(tmp_path, finished_run)


def attack(name: str) -> Callable[[Attack], Attack]:
    def add(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return add


def announce(name: str) -> Attack:
    def change(run: Path, outside: Path) -> None:
        (run / "sub").mkdir()
        (run / ".pending").mkdir(exist_ok=True)
        (run / ".pending" / quote(name.replace("OUTSIDE", str(outside)), safe="")).touch()

    return change


def name_in_manifest(name: str, entry: int) -> Attack:
    def change(run: Path, outside: Path) -> None:
        (run / "sub").mkdir()
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["checkpoints"][entry]["name"] = name.replace("OUTSIDE", str(outside))
        (run / "manifest.json").write_text(json.dumps(manifest))

    return change


def name_in_listing(name: str) -> Attack:
    def change(run: Path, outside: Path) -> None:
        (run / "manifest.json").unlink()
        for file in run.glob("*/.checkpoint.json"):
            listing = json.loads(file.read_text())
            listing["entry"]["name"] = name.replace("OUTSIDE", str(outside))
            file.write_text(json.dumps(listing))

    return change


def file_in_listing(name: str) -> Attack:
    def change(run: Path, outside: Path) -> None:
        for file in run.glob("*/.checkpoint.json"):
            listing = json.loads(file.read_text())
            listing["files"][name.replace("OUTSIDE", str(outside))] = [84, None]
            file.write_text(json.dumps(listing))

    return change


NAMES = ("../../outside", "OUTSIDE", "sub/../../../outside", "..", ".", "")
for hostile in NAMES:
    ATTACKS[f"announcement {hostile!r}"] = announce(hostile or "/")
    ATTACKS[f"oldest in manifest {hostile!r}"] = name_in_manifest(hostile, 0)
    ATTACKS[f"newest in manifest {hostile!r}"] = name_in_manifest(hostile, -1)
    ATTACKS[f"listing {hostile!r}"] = name_in_listing(hostile)
    ATTACKS[f"file in listing {hostile!r}"] = file_in_listing(f"{hostile}/file.json")


def link(relative: str, target: str = "") -> Attack:
    def change(run: Path, outside: Path) -> None:
        path = run / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(outside / target)

    return change


for own in (".lock", "result.json", "result_rank_1.json", "result_other.json", "progress.csv", "timeline.jsonl",
            "usage.jsonl", "run.json", "manifest.json", "trainer.pkl", ".progress.csv.draft", "error.json",
            "error.txt", "logs/rank_0.log",
            "checkpoint_000001/.checkpoint.json", "checkpoint_000001/.metadata.json", "checkpoint_000001/.pinned",
            "checkpoint_000003/.metadata.json", "checkpoint_000003/.pinned"):  # fmt: skip
    ATTACKS[f"link {own}"] = link(own, "file.json")
for own in (".pending", "logs", "artifacts", "best", "best/sub", "checkpoint_000001", "checkpoint_000003",
            "checkpoint_000004", "checkpoint_000005", "checkpoint_000003/sub",
            "checkpoint_000004/.rank_0"):  # fmt: skip
    ATTACKS[f"link {own}"] = link(own)


@attack("uncommitted directory with links")
def _uncommitted(run: Path, outside: Path) -> None:
    link("checkpoint_000007/sub")(run, outside)
    link("checkpoint_000007/file.json", "file.json")(run, outside)


@attack("named directory that was never committed, with a link")
def _named(run: Path, outside: Path) -> None:
    shutil.rmtree(run / "best")
    link("best/sub")(run, outside)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["checkpoints"] = [entry for entry in manifest["checkpoints"] if entry["name"] != "best"]
    (run / "manifest.json").write_text(json.dumps(manifest))


@attack("committed checkpoint below a link")
def _below_a_link(run: Path, outside: Path) -> None:
    link("linked")(run, outside)
    name_in_manifest("linked/sub", 0)(run, outside)


@attack("announcement below a link")
def _announcement_below_a_link(run: Path, outside: Path) -> None:
    link("real/linked")(run, outside)
    announce("real/linked/sub")(run, outside)


def command(*arguments: str) -> Callable[[Scene], object]:
    return lambda scene: main([argument.replace("RUN", str(scene.run)) for argument in arguments])


def resume(**options: Any) -> Callable[[Scene], object]:
    def fit(scene: Scene) -> object:
        run = RunConfig(resume=str(scene.run), verbose=0, **options)
        return trainer(run, scene.directory / "reported").fit()

    return fit


def resume_by_name(scene: Scene) -> object:
    run = RunConfig(name="run", storage_path=str(scene.run.parent), resume="auto", verbose=0)
    return trainer(run, scene.directory / "reported").fit()


def restore(scene: Scene) -> object:
    directory = str(scene.directory / "reported")
    return DataParallelTrainer.restore(str(scene.run), train_loop_config={"directory": directory}).fit()


def export(scene: Scene) -> object:
    return main(["checkpoints", "export", str(scene.run), "latest", str(scene.directory / "export")])


def change_checkpoints(scene: Scene) -> None:
    for checkpoint, _ in Result.from_path(scene.run).best_checkpoints:
        checkpoint.pin()
        checkpoint.update_metadata({"key": "value"})
        checkpoint.unpin()
        with checkpoint.as_directory():
            pass


def delete_all(scene: Scene) -> None:
    delete_checkpoints(local_storage(scene.run))


ENTRIES: dict[str, Callable[[Scene], object]] = {
    "runs gc": command("runs", "gc", "RUN", "--yes"),
    "runs gc --keep-last": command("runs", "gc", "RUN", "--keep-last", "1", "--yes"),
    "runs list": command("runs", "list", "RUN"),
    "checkpoints list": command("checkpoints", "list", "RUN"),
    "checkpoints verify": command("checkpoints", "verify", "RUN", "--checksums"),
    "checkpoints export": export,
    "resume a path": resume(),
    "resume with retention": resume(checkpoint_config=CheckpointConfig(num_to_keep=1)),
    "resume a name": resume_by_name,
    "restore": restore,
    "checkpoints of a result": change_checkpoints,
    "delete_checkpoints": delete_all,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_outside_of_a_hostile_run_directory_is_changed(attack: str, entry: str, scene: Scene) -> None:
    ATTACKS[attack](scene.run, scene.outside)

    with contextlib.suppress(Exception):  # which error it is has tests of its own
        ENTRIES[entry](scene)

    scene.assert_nothing_outside_changed()


@pytest.mark.parametrize(
    "name",
    ["../../outside", "/outside", "sub/../../outside", "..", ".", "", "/", "a/", "a//b", ".hidden", "a\0b", "artifacts",
     "run.json", 3, None],
)  # fmt: skip
def test_name_that_no_checkpoint_can_have_is_refused(name: object) -> None:
    with pytest.raises(StorageError, match=r"manifest\.json: expected"):
        require_checkpoint_name(name, "manifest.json")
    with pytest.raises(StorageError, match="expected"):
        CommittedCheckpoint(name=name, number=1, iteration=1, metrics={}, time=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["checkpoint_000001", "best", "of epoch 3", "sub/step_1", "a..b"])
def test_name_that_a_checkpoint_can_have_is_accepted(name: str) -> None:
    assert require_checkpoint_name(name, "manifest.json") == name


@pytest.mark.parametrize("path", ["../file", "/file", "a/../../file", "a/./b", "a\0b"])
def test_file_outside_of_the_checkpoint_is_refused_in_its_list(path: str) -> None:
    listing = {"version": 1, "entry": {}, "files": {path: [1, None]}}
    with pytest.raises(StorageError, match=r"\.checkpoint\.json: expected a path below this directory"):
        parse_listing(json.dumps(listing).encode(), ".checkpoint.json")


@pytest.mark.parametrize("name", ["../outside", "OUTSIDE", "a/../../outside"])
def test_storage_refuses_every_operation_outside_of_its_root(name: str, scene: Scene) -> None:
    storage, name = local_storage(scene.run), name.replace("OUTSIDE", str(scene.outside))
    operations: list[Callable[[], object]] = [
        lambda: storage.path(name),
        lambda: storage.path("sub", name),
        lambda: storage.exists(name),
        lambda: storage.read_bytes(f"{name}/file.json"),
        lambda: storage.write_bytes(f"{name}/file.json", b""),
        lambda: storage.walk(name),
        lambda: storage.list_names(name),
        lambda: storage.delete(name),
        lambda: put_directory(storage, str(scene.outside), name),
        lambda: storage.inside(name),
        lambda: checkpoint_in(storage, name),
    ]
    for operation in operations:
        with pytest.raises(StorageError, match=r"expected (a path below|the name of a file in) this directory"):
            operation()
    scene.assert_nothing_outside_changed()


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_storage_never_deletes_its_root(name: str, scene: Scene) -> None:
    with pytest.raises(StorageError, match="expected a path below this directory"):
        local_storage(scene.run).delete(name)
    assert scene.run.exists()


def test_link_in_the_place_of_a_checkpoint_is_deleted_and_its_target_is_kept(scene: Scene) -> None:
    link("checkpoint_000009")(scene.run, scene.outside)
    link("checkpoint_000001")(scene.run, scene.outside)

    assert main(["runs", "gc", str(scene.run), "--keep-last", "1", "--yes"]) == 0

    assert not os.path.lexists(scene.run / "checkpoint_000009")
    assert not os.path.lexists(scene.run / "checkpoint_000001")
    scene.assert_nothing_outside_changed()


def test_error_names_the_file_and_what_to_do(scene: Scene) -> None:
    name_in_manifest("../../outside", 0)(scene.run, scene.outside)
    with contextlib.suppress(StorageError):  # or the checkpoints are recovered from their listings
        assert all(entry.name != "../../outside" for entry in read_manifest(local_storage(scene.run)))

    link("result.json", "file.json")(scene.run, scene.outside)
    with pytest.raises(StorageError, match=r"result\.json: expected .* got a symbolic link.*Delete the link"):
        resume()(scene)


def test_link_of_a_user_is_followed_only_inside_of_the_run_directory(scene: Scene) -> None:
    (scene.run / "latest").symlink_to("checkpoint_000003")
    resume()(scene)

    link("wandb")(scene.run, scene.outside)
    with pytest.raises(StorageError, match=r"wandb: expected .* got a symbolic link"):
        resume()(scene)


@pytest.fixture
def bucket() -> Iterator[Storage]:
    """A storage without directories, whose objects may have any name."""
    storage = Storage(*locate("memory://hostile/run", what="the test"))
    yield storage
    storage.filesystem.delete(storage.root)


def test_objects_whose_names_leave_the_checkpoint_are_not_downloaded(
    bucket: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write_bytes("checkpoint_000001/weights.txt", b"1")
    found = {**bucket.walk("checkpoint_000001"), "../../escaped.txt": 1}
    # The in-memory filesystem normalizes names, which S3 does not.
    monkeypatch.setattr(type(bucket.filesystem), "walk", lambda *_: found)

    with pytest.raises(StorageError, match="expected a path below this directory"):
        bucket.get_directory("checkpoint_000001", str(tmp_path / "deep" / "er"))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["../escaped", "/escaped", "a/b", ".."])
def test_directory_of_a_node_has_a_plain_name(key: str) -> None:
    with pytest.raises(StorageError, match="expected"), share_directory("downloads", key):
        pass
