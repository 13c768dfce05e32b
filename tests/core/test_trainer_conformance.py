"""The conformance kit for trainers, applied to the trainer of the core."""

from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer
from drivetrain_testing import TrainerConformance


def train(config: dict[str, Any]) -> None:
    for step in range(config["steps"]):
        directory = Path(drivetrain.get_context().get_trial_dir(), f"step_{step}")
        directory.mkdir(exist_ok=True)
        (directory / "state").write_text(str(step))
        drivetrain.report({"step": step}, Checkpoint.from_directory(directory))


class TestDataParallelTrainer(TrainerConformance):
    trainer = DataParallelTrainer
    name = "data_parallel"
    num_workers = 0

    def arguments(self) -> dict[str, Any]:
        return {"train_loop_per_worker": train, "train_loop_config": {"steps": 2}, "metadata": {"of": "a test"}}


def test_class_without_a_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an attribute `trainer`"):
        type("TestNothing", (TrainerConformance,), {"trainer": "torch"})
