"""The best trial is that of Optuna: by the last report that has the metric, among the trials that have completed."""

import math
import sys
from typing import Any

import optuna

import drivetrain
import drivetrain_tune as tune
from drivetrain import RunConfig

WORST = 3


def train_func(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["x"] + 10.0})
    if config["kind"] == "failed":
        raise ValueError("this trial has the best loss, and fails")
    drivetrain.report({"loss": math.nan if config["kind"] == "diverged" else config["x"], "early": config["x"]})
    drivetrain.report({"test_accuracy": 1})


class PruneFirst(optuna.pruners.BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return bool(trial.params["x"] == -9.0)


if __name__ == "__main__":
    kinds = {-9.0: "pruned", -8.0: "failed", -7.0: "diverged"}
    tuner = tune.Tuner(
        train_func,
        param_space={
            "x": tune.grid_search([*kinds, 2.0, 1.0, WORST]),
            "kind": tune.sample_from(lambda config: kinds.get(config["x"], "completed")),
        },
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=PruneFirst()),
        run_config=RunConfig(name="search"),
    )
    grid = tuner.fit()
    states = [result.state for result in grid]
    found = [
        grid.study.best_trial.params["x"],
        grid.get_best_result().config["x"],
        grid.get_best_result("early", "max").config["x"],
        tune.Tuner.restore(grid.experiment_path, train_func).get_results().get_best_result().config["x"],
    ]
    print(states, found)
    right = found == [1.0, 1.0, WORST, 1.0] and states == ["pruned", "failed", *["completed"] * 4]
    sys.exit(not right)
