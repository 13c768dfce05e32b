"""Every domain of a search space becomes a value: in options, lists, tuples, and return values of functions.

Keys whose paths would be equal are rejected, and `Result.config` is what the trial has received.
"""

import random
import sys
from typing import Any

import drivetrain
import drivetrain_tune as tune
from drivetrain import ConfigurationError, RunConfig

SPACE = {
    "dropout": tune.choice([0.0, tune.uniform(0.1, 0.5)]),
    "optimizer": tune.choice([{"name": "sgd", "momentum": tune.choice([0.8, 0.9])}, {"name": "adam", "betas": [0.9]}]),
    "betas": (tune.uniform(0.8, 0.9), 0.999),
    "layers": [{"width": tune.randint(8, 16)}],
    "batch": tune.grid_search([{"size": tune.grid_search([1, 2])}, 4]),
    "noise": tune.sample_from(lambda config: random.random() + config["late"]),
    "late": tune.sample_from(lambda config: tune.uniform(1, config["layers"][0]["width"])),
}


def train_func(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["noise"], "got": repr(config)})


def search(space: dict[str, Any]) -> tune.ResultGrid:
    return tune.Tuner(
        train_func,
        param_space=space,
        run_config=RunConfig(verbose=0),
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=2),
    ).fit()


if __name__ == "__main__":
    problems = []
    grid = search(SPACE)
    for result in grid:
        if any(name in result.metrics["got"] for name in ("Range", "Choice", "Computed", "grid_search")):
            problems.append(f"a domain arrived as an object: {result.metrics['got']}")
        if repr(result.config) != result.metrics["got"]:
            problems.append(f"the result has the config {result.config}, the trial had {result.metrics['got']}")
    batches = [result.config["batch"] for result in grid]
    if batches != [{"size": 1}, {"size": 2}, 4] * 2:
        problems.append(f"the grids gave {batches}")
    stored = [result.config for result in tune.Tuner.restore(grid.experiment_path, train_func).get_results()]
    if stored != [result.config for result in grid]:
        problems.append(f"the restored search has the configs {stored}")
    try:
        search({"a/b": tune.uniform(0, 1), "a": {"b": tune.uniform(2, 3)}})
        problems.append("two keys with the same path were accepted")
    except ConfigurationError as error:
        print(error)
    print("\n".join(problems))
    sys.exit(bool(problems))
