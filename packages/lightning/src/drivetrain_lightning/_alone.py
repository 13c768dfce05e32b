"""Refuses a ``Trainer`` that would train alone on each worker. Lightning adds the callback to every ``Trainer``."""

from __future__ import annotations

import os
from typing import Any

from drivetrain import ConfigurationError, SessionError, get_context

__all__ = ["RefusesTrainingAlone", "is_in_group"]


def is_in_group() -> bool:
    """Return True in a train function, or in a script, whose workers train together with PyTorch."""
    try:
        several = get_context().get_world_size() > 1
    except SessionError:
        return False
    return several and "TORCHELASTIC_RUN_ID" in os.environ


class RefusesTrainingAlone:
    """A callback that checks the number of processes of the trainer before training."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a trainer with another number of processes than that of the workers."""
        workers = get_context().get_world_size()
        if stage == "fit" and trainer.world_size != workers:
            raise ConfigurationError(
                f"[DT-761] Trainer: expected a trainer for all {workers} workers, got one for {trainer.world_size} "
                "process, so that each worker would train a model of its own. Pass Trainer(strategy=RayDDPStrategy(), "
                f"plugins=[RayLightningEnvironment()]) or, as with torchrun, Trainer(devices={workers})"
            )
