"""``prepare_trainer``: the check before a training."""

from __future__ import annotations

from typing import TypeVar

from drivetrain import ConfigurationError
from drivetrain_lightning._worker import check_strategy

__all__ = ["prepare_trainer"]

T = TypeVar("T")


def prepare_trainer(trainer: T) -> T:
    """Checks that a Lightning ``Trainer`` fits the worker that it was made in.

    Args:
        trainer: of ``lightning.pytorch`` or ``pytorch_lightning``.

    Returns:
        The same trainer.

    Raises:
        ConfigurationError: its strategy or its cluster environment is none of this package, or its devices are not
            this worker's; the message says what to pass to the ``Trainer``.
        SessionError: called outside a train function.
    """
    if not hasattr(trainer, "strategy"):
        raise ConfigurationError(f"prepare_trainer: expected a Trainer of Lightning, got {trainer!r}")
    check_strategy(trainer.strategy)
    return trainer
