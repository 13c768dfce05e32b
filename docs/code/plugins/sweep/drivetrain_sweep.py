"""A tiny system for searches, and the plugin with which it runs trainers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import drivetrain
from drivetrain.plugin.callbacks import Trial

Trainable = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def sweep(
    trainable: Trainable, configs: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the config with the lowest loss. It knows nothing about drivetrain."""
    return min(configs, key=lambda config: trainable(config)["loss"])


def make_trainable(
    trainer: drivetrain.DataParallelTrainer,
    *,
    argument: str | None = None,
    autoscaling: bool = False,
) -> Trainable:
    """Return a function that runs the trainer with a trial's config."""
    started = 0

    def trainable(config: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal started
        started += 1
        changes = config if argument is None else {argument: config}
        trial = Trial(name=f"trial_{started}", id=f"{started:04}", experiment="sweep")
        run_config = trainer.given.get("run_config") or drivetrain.RunConfig()
        named = replace(run_config, name=trial.name)
        return trainer.vary(changes, trial=trial, run_config=named).fit().metrics

    return trainable
