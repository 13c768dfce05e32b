"""Trainers with one mistake each, as classes of the conformance kit. ``test_broken_trainers.py`` runs them."""

import threading
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_testing import TrainerConformance


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


def train_silently() -> None:
    """Train without a report."""


class Kit(TrainerConformance):
    trainer: Any = DataParallelTrainer
    num_workers = 0

    def arguments(self) -> dict[str, Any]:
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}}


class RestoreLosesTheConfig(DataParallelTrainer):
    @classmethod
    def restore(cls, path: Any, *args: Any, **arguments: Any) -> Any:
        return super().restore(path, *args, **{**arguments, "train_loop_config": {}})


class TestRestoreLosesTheConfig(Kit):
    trainer = RestoreLosesTheConfig


class RestoreReturnsTheBaseClass(DataParallelTrainer):
    @classmethod
    def restore(cls, path: Any, *args: Any, **arguments: Any) -> Any:
        return DataParallelTrainer.restore(path, *args, **arguments)


class TestRestoreReturnsTheBaseClass(Kit):
    trainer = RestoreReturnsTheBaseClass


class RestoreStartsAnotherRun(DataParallelTrainer):
    @classmethod
    def restore(cls, path: Any, *args: Any, **arguments: Any) -> Any:
        restored = super().restore(path, *args, **arguments)
        run_config = RunConfig(storage_path=Path(path).parent / "again", verbose=0)
        return cls(train, train_loop_config=restored.given["train_loop_config"], run_config=run_config)


class TestRestoreStartsAnotherRun(Kit):
    trainer = RestoreStartsAnotherRun


class RestoreIgnoresSubclasses(DataParallelTrainer):
    @classmethod
    def restore(cls, path: Any, *args: Any, **arguments: Any) -> Any:
        return RestoreIgnoresSubclasses(train, run_config=RunConfig(resume=str(path), verbose=0))


class TestRestoreIgnoresSubclasses(Kit):
    trainer = RestoreIgnoresSubclasses


class IgnoresUnknownArguments(DataParallelTrainer):
    def __init__(self, train_loop_per_worker: Any, *, train_loop_config: Any = None, **arguments: Any) -> None:
        known = {name: value for name, value in arguments.items() if name in ("scaling_config", "run_config")}
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, **known)


class TestIgnoresUnknownArguments(Kit):
    trainer = IgnoresUnknownArguments


class ReplacesWrongTypes(DataParallelTrainer):
    def __init__(self, train_loop_per_worker: Any, *, scaling_config: Any = None, **arguments: Any) -> None:
        scaling = scaling_config if isinstance(scaling_config, ScalingConfig) else None
        super().__init__(train_loop_per_worker, scaling_config=scaling, **arguments)


class TestReplacesWrongTypes(Kit):
    trainer = ReplacesWrongTypes


class HoldsALock(DataParallelTrainer):
    def __init__(self, train_loop_per_worker: Any, **arguments: Any) -> None:
        super().__init__(train_loop_per_worker, **arguments)
        self._lock = threading.Lock()


class TestHoldsALock(Kit):
    trainer = HoldsALock


class DropsArguments:
    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        return super().__new__(cls)


class LosesArgumentsInNew(DropsArguments, DataParallelTrainer):
    pass


class TestLosesArgumentsInNew(Kit):
    trainer = LosesArgumentsInNew


class VaryIgnoresChanges(DataParallelTrainer):
    def vary(self, changes: Any, **replaced: Any) -> Any:
        return super().vary({}, **replaced)


class TestVaryIgnoresChanges(Kit):
    trainer = VaryIgnoresChanges


class UnregisteredTrainer(DataParallelTrainer):
    pass


class TestUnregistered(Kit):
    trainer = UnregisteredTrainer
    name = "unregistered"


class TestNeverReports(Kit):
    trainer = DataParallelTrainer

    def arguments(self) -> dict[str, Any]:
        return {"train_loop_per_worker": train_silently}
