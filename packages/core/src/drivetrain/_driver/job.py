"""The job of one call of ``fit()``: the checked arguments of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._base.redact import describe
from drivetrain._driver.functions import values_of_config
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import Trial
from drivetrain._plugins.data_config import DataConfig
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain.config import RunConfig, ScalingConfig

__all__ = ["TrainingJob"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """The checked arguments of a trainer, as one call of ``fit()`` uses them.

    Attributes:
        function: the train function.
        config: the config that is passed to the train function: a dict, an object of a dataclass, or None.
        backend: the backend that sets up the framework on the workers.
        scaling: the number of workers and their resources.
        run_config: the configuration of the run.
        datasets: the datasets by name.
        data_config: the rules for splitting the datasets.
        metadata: the metadata that the user passed to the trainer.
        resume_from: the checkpoint from which a new run starts; None for no checkpoint.
        trainer: the name of the trainer's class.
        trial: the trial to which the run belongs in a hyperparameter search; None outside a search.
        all_values: True if ``Result.return_value`` is a list of the return values of all ranks.
    """

    function: Callable[..., Any]
    config: Any
    backend: Backend
    scaling: ScalingConfig
    run_config: RunConfig
    datasets: Mapping[str, Any]
    data_config: DataConfig
    metadata: Mapping[str, Any]
    resume_from: Checkpoint | None
    trainer: str
    trial: Trial | None = None
    all_values: bool = False

    @property
    def config_values(self) -> Mapping[str, Any] | None:
        """The values in the config by name; None if there is no config."""
        return None if self.config is None else values_of_config(self.config)

    def facts(self) -> dict[str, Any]:
        """Return the part of ``run.json`` that describes the configuration, as text."""
        return {
            "trainer": self.trainer,
            "train_function": getattr(self.function, "__qualname__", type(self.function).__qualname__),
            "scaling_config": describe(self.scaling),
            "run_config": describe(self.run_config),
            "train_loop_config": describe(self.config_values),
        }
