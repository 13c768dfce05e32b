"""The trainer's RunConfig holds in every trial, also if the Tuner has a RunConfig of its own with a name and storage.

A search never uses a directory that contains a run, another search, or other files.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import drivetrain
import drivetrain_tune as tune
from drivetrain import Callback, DataParallelTrainer, FailureConfig, RunConfig, RunExistsError, ScalingConfig


class Count(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_run_start(self, run: drivetrain.plugin.Run) -> None:
        with self.file.open("a") as file:
            file.write(f"{run.name}\n")


def train_func(config: dict[str, Any]) -> None:
    marker = Path(drivetrain.get_context().get_trial_dir(), "failed")
    if not marker.exists():
        marker.touch()
        raise RuntimeError("the first attempt fails")
    for step in range(10):
        drivetrain.report({"step": step})


def search(trainer: DataParallelTrainer, **run_config: Any) -> tune.ResultGrid:
    return tune.Tuner(
        trainer,
        param_space={"train_loop_config": {"lr": tune.grid_search([1, 2])}},
        tune_config=tune.TuneConfig(metric="step", mode="max"),
        run_config=RunConfig(verbose=0, **run_config),
    ).fit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        started, storage = Path(directory, "started"), Path(directory, "runs")
        trainer = DataParallelTrainer(
            train_func,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="of the trainer",
                storage_path=storage,
                stop={"step": 2},
                failure_config=FailureConfig(max_failures=1),
                callbacks=[Count(started)],
                verbose=0,
            ),
        )
        steps = [result.metrics["step"] for result in search(trainer, name="of the search")]
        names = sorted(started.read_text().split())
        print(steps, names)
        right = steps == [2, 2] and names == ["trial_00000", "trial_00001"]

        trainer.fit()
        (storage / "with a file").mkdir()
        (storage / "with a file" / "notes.txt").touch()
        for name in ("of the trainer", "of the search", "with a file"):
            before = sorted(os.listdir(storage / name))
            try:
                search(trainer, name=name)
                right = False
                print(f"a search was written into {name!r}")
            except RunExistsError as error:
                right = right and before == sorted(os.listdir(storage / name))
                print(error)
    sys.exit(not right)
