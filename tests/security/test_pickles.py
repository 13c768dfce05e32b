"""Nothing that is read from a run directory is unpickled, except by the functions whose documentation says so."""

import json
import os
import pickle
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, DrivetrainError, Result, RunConfig, ScalingConfig
from drivetrain_interactive import load_checkpoint
from drivetrain_interactive._dicts import DICT_FILE
from tests.security.conftest import Command, read_in_python, reading_commands


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture
def mark(place: Path) -> Path:
    """The directory that appears if anything of the hostile run is unpickled."""
    mark = place.parent / "unpickled"
    data = pickle.dumps({"version": 1, "parts": {"train_loop_config": Canary(mark)}, "missing": ["run_config"]})
    hostile = place / "hostile"
    (hostile / "trainer.pkl").write_bytes(data)
    (hostile / "tuner.pkl").write_bytes(data)
    for checkpoint in hostile.glob("checkpoint_*"):
        for name in (DICT_FILE, "model.pkl", "data.pt"):
            (checkpoint / name).write_bytes(data)
    return mark


def test_canary_works(mark: Path, place: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"restore: expected the stored .* could not be pickled"):
        DataParallelTrainer.restore(place / "hostile")
    assert mark.exists()


def test_commands_unpickle_nothing(mark: Path, place: Path, command: Command) -> None:
    for words in reading_commands(place / "hostile", place / "good", place.parent):
        command(*words)
    command("runs", "gc", place, "--keep-last", "1", "--yes")
    assert not mark.exists()


def test_result_and_checkpoints_unpickle_nothing(mark: Path, place: Path) -> None:
    read_in_python(place / "hostile")
    assert DataParallelTrainer.can_restore(place / "hostile")
    checkpoint = Checkpoint(place / "hostile" / "checkpoint_000001")
    checkpoint.to_directory(place.parent / "copy")
    checkpoint.pin()
    checkpoint.unpin()
    assert Result.from_path(place / "hostile").metrics
    assert not mark.exists()


def test_resume_unpickles_nothing(mark: Path, place: Path) -> None:
    trainer = (place / "hostile" / "trainer.pkl").read_bytes()
    named = {"name": "hostile", "storage_path": str(place)}
    ways = ({"resume": str(place / "hostile")}, {"resume": "auto", **named}, {"resume": "must", **named})
    for starts, way in enumerate(ways, start=2):
        (place / "hostile" / "trainer.pkl").write_bytes(trainer)  # the run before has replaced it
        result = DataParallelTrainer(
            lambda: drivetrain.report({"resumed_from": drivetrain.get_checkpoint().path}),
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(verbose=0, **way),
        ).fit()
        assert result.metrics["resumed_from"].endswith("hostile/checkpoint_000003")
        assert json.loads((place / "hostile" / "run.json").read_text())["starts"] == starts
        assert not mark.exists()


@pytest.mark.parametrize("function", [DataParallelTrainer.restore, load_checkpoint])
def test_functions_that_unpickle_say_so(function: object) -> None:
    words = " ".join((function.__doc__ or "").split())
    assert "unpickle" in words
    assert "execute" in words


def test_restoring_a_search_says_that_it_unpickles() -> None:
    tune = pytest.importorskip("drivetrain_tune")
    words = " ".join((tune.Tuner.restore.__doc__ or "").split())
    assert "unpickle" in words
    assert "execute" in words
