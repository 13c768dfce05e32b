"""Describes Accelerate and Transformers for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain import TrainContext
from drivetrain.plugin import Framework
from drivetrain.plugin.backends import is_instance_of, visible_gpus

__all__ = ["AccelerateFramework", "TransformersFramework"]

_OF_ACCELERATE = (
    ("accelerate", "Accelerator"),
    ("accelerate", "PartialState"),
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "GradientState"),
    ("accelerate.data_loader", "DataLoaderShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("accelerate.scheduler", "AcceleratedScheduler"),
)


class AccelerateFramework(Framework):
    """Knows the ``Accelerator``, which stores the number of processes, and the objects that it has prepared."""

    def belongs_to_process(self, value: object) -> bool:
        """Return True for an ``Accelerator`` and its state, and for the loaders and optimizers that it has prepared."""
        return any(is_instance_of(value, module, name) for module, name in _OF_ACCELERATE)

    def launcher_variables(self, context: TrainContext, max_failures: int) -> Mapping[str, str]:
        """On a machine without GPUs, return the variable without which each process would train alone."""
        return {} if visible_gpus() else {"ACCELERATE_USE_CPU": os.environ.get("ACCELERATE_USE_CPU", "true")}


class TransformersFramework(Framework):
    """Knows the ``Trainer``, which contains an ``Accelerator``."""

    def belongs_to_process(self, value: object) -> bool:
        """Return True for a ``Trainer``, and for ``TrainingArguments`` that have looked up the number of processes."""
        if is_instance_of(value, "transformers", "TrainingArguments"):
            return getattr(value, "distributed_state", None) is not None
        return is_instance_of(value, "transformers", "Trainer")
