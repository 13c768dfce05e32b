"""Run directories of earlier and later releases. `run_v1` was written by the first release of format version 1."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import DataParallelTrainer, Result, RunConfig, ScalingConfig, StorageError
from drivetrain._storage.layout import VERSION
from drivetrain.runs import RunReader
from drivetrain_console import main
from tests.security.stored_run import train
from tests.support import local_storage

STORED = Path(__file__).parent / "run_v1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "run_v1"))


def resume(run: Path) -> Result:
    config = RunConfig(resume=str(run), verbose=0)
    return DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=config).fit()


def restore(run: Path) -> Result:
    return DataParallelTrainer.restore(str(run)).fit()


def steps(result: Result) -> list[str]:
    return [Path(checkpoint.path, "step.txt").read_text() for checkpoint, _ in result.best_checkpoints]


def test_stored_run_has_the_first_version() -> None:
    assert json.loads((STORED / "run.json").read_text())["version"] == 1
    assert VERSION >= 1


def test_run_of_format_version_1_can_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result.from_path(run)

    assert result.metrics["step"] == 2
    assert steps(result) == ["1", "2"]
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()
    record = RunReader(local_storage(run)).record()
    assert (record.status, record.iterations, len(record.history.attempts)) == ("finished", 2, 1)
    assert main(["checkpoints", "verify", str(run)]) == 0
    assert capsys.readouterr().out.split() == ["checkpoint_000001", "ok", "second", "ok"]


@pytest.mark.parametrize("again", [resume, restore])
def test_run_of_format_version_1_can_be_resumed(run: Path, again: Callable[[Path], Result]) -> None:
    result = again(run)

    assert result.metrics["step"] == 3
    assert steps(result) == ["1", "2", "3"]
    assert json.loads((run / "run.json").read_text())["version"] == VERSION
    assert json.loads((run / "run.json").read_text())["starts"] == 2


def rewrite(file: Path, version: object) -> None:
    """Gives a file another version."""
    if file.suffix == ".pkl":
        file.write_bytes(pickle.dumps({**pickle.loads(file.read_bytes()), "version": version}))
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), "version": version}))


ENTRIES: dict[str, Callable[[Path], object]] = {
    "Result.from_path": Result.from_path,
    "read_run": lambda run: RunReader(local_storage(run)).record(),
    "resume": resume,
    "checkpoints": lambda run: Result.from_path(run).checkpoint,
    "verify": lambda run: [checkpoint.verify() for checkpoint, _ in Result.from_path(run).best_checkpoints],
    "restore": restore,
}


@pytest.mark.parametrize(
    ("file", "entry"),
    [("run.json", entry) for entry in ENTRIES]
    + [("manifest.json", entry) for entry in ("checkpoints", "read_run", "resume", "restore", "verify")]
    + [("second/.checkpoint.json", "verify"), ("trainer.pkl", "restore")],
)
def test_file_of_a_newer_release_is_refused_and_left_as_it_is(file: str, entry: str, run: Path) -> None:
    rewrite(run / file, VERSION + 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    with pytest.raises(StorageError, match=rf"{file} was written by a newer drivetrain .*up to {VERSION}, got"):
        ENTRIES[entry](run)

    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_gc_leaves_a_run_of_a_newer_release_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run / "run.json", VERSION + 1)
    (run / "checkpoint_000009").mkdir()

    assert main(["runs", "gc", str(run), "--yes", "--keep-last", "1"]) == 0

    assert "was written by a newer drivetrain" in capsys.readouterr().out
    assert (run / "checkpoint_000009").exists()


def test_version_that_is_no_number_is_refused(run: Path) -> None:
    rewrite(run / "run.json", "1; or 2")
    with pytest.raises(StorageError, match=r"run\.json: expected 'version' to be an integer"):
        Result.from_path(run)
