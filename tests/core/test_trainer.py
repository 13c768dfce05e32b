"""The arguments of trainers: for a trainer of one backend, and for copies of a trainer."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import drivetrain
from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig, StorageError
from drivetrain._hooks.backend import NoBackend
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.trainers import TrainerArguments, checked_config

if TYPE_CHECKING:
    from typing_extensions import Unpack


def train(config: dict[str, Any]) -> int:
    drivetrain.report(epoch=config["epochs"])
    return drivetrain.get_context().get_world_size()


@dataclass(frozen=True, kw_only=True)
class QuietConfig(BackendConfig):
    level: int = 0

    def create(self) -> Backend:
        return NoBackend()


class QuietTrainer(DataParallelTrainer):
    """A trainer for one backend."""

    def __init__(
        self,
        train_loop_per_worker: Any,
        *,
        quiet_config: QuietConfig | None = None,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        config = checked_config(quiet_config, QuietConfig, "QuietTrainer(quiet_config=...)")
        super().__init__(train_loop_per_worker, backend_config=config, **arguments)


class QuieterTrainer(QuietTrainer):
    """A trainer with its own arguments."""

    def __init__(self, *levels: int, epochs: int = 1, **arguments: Any) -> None:
        config = QuietConfig(level=sum(levels))
        super().__init__(train, train_loop_config={"epochs": epochs}, quiet_config=config, **arguments)


def test_trainer_for_a_backend_takes_its_configuration_under_its_name(tmp_path: Path) -> None:
    trainer = QuietTrainer(
        train,
        quiet_config=QuietConfig(level=3),
        train_loop_config={"epochs": 2},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    )
    assert trainer.fit().return_value == 1
    restored = QuietTrainer.restore(tmp_path / "run")
    assert restored.given["quiet_config"] == QuietConfig(level=3)
    assert trainer.vary({"quiet_config": {"level": 4}}).given["quiet_config"] == QuietConfig(level=4)


def test_trainer_for_a_backend_refuses_other_configurations() -> None:
    with pytest.raises(ConfigurationError, match=r"QuietTrainer\(quiet_config=...\): expected QuietConfig, got 'loud'"):
        QuietTrainer(train, quiet_config="loud")  # type: ignore[arg-type]


def test_signature_shows_the_arguments_as_they_are_passed() -> None:
    common = ["train_loop_per_worker", "train_loop_config", "scaling_config", "run_config", "datasets"]
    common += ["dataset_config", "metadata", "resume_from_checkpoint"]
    assert set(inspect.signature(DataParallelTrainer).parameters) == {*common, "backend_config"}
    assert list(inspect.signature(QuietTrainer).parameters) == ["train_loop_per_worker", "quiet_config", "arguments"]
    assert list(inspect.signature(QuieterTrainer).parameters) == ["levels", "epochs", "arguments"]
    assert {*TrainerArguments.__annotations__, "train_loop_per_worker"} == set(common)


def test_arguments_of_a_trainer_with_its_own_constructor_are_kept_as_they_were_passed() -> None:
    trainer = QuieterTrainer(1, 2, epochs=3, metadata={"of": "a test"})
    assert trainer.given == {"epochs": 3, "metadata": {"of": "a test"}}
    assert trainer.known_arguments is None
    varied = trainer.vary({"epochs": 4})
    assert varied.given == {"epochs": 4, "metadata": {"of": "a test"}}
    assert varied.vary({}).given == varied.given
    arguments = TrainerArguments.__annotations__.keys()
    assert QuietTrainer(train).known_arguments == {"train_loop_per_worker", "quiet_config", *arguments}


@pytest.mark.parametrize("clone", [copy.copy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_copy_of_a_trainer_has_its_arguments(clone: Any) -> None:
    trainer = QuietTrainer(train, train_loop_config={"epochs": 1}, quiet_config=QuietConfig(level=1))
    assert clone(trainer).given == trainer.given
    assert clone(trainer).vary({"quiet_config": {"level": 2}}).given["quiet_config"].level == 2


def test_arguments_dropped_by_a_base_class_are_an_error() -> None:
    class Mixin:
        def __new__(cls, *args: object, **kwargs: object) -> Any:
            return super().__new__(cls)

    class Mixed(Mixin, DataParallelTrainer):
        pass

    with pytest.raises(ConfigurationError, match="pass on all arguments"):
        _ = Mixed(print).given


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A full filesystem."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small filesystem cannot be mounted here: {mounted.stderr.decode()}")
    with contextlib.suppress(OSError):
        (place / "file").write_bytes(bytes(1 << 20))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_disk_at_the_start_is_an_error_that_names_the_run_directory(full_disk: Path) -> None:
    with pytest.raises(
        StorageError, match=r"\[DT-401\] the run directory .*/full/run cannot be written .*Free disk space"
    ):
        DataParallelTrainer(print, run_config=RunConfig(name="run", storage_path=full_disk, verbose=0)).fit()
