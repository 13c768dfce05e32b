"""``prepare_trainer``, which checks a trainer before training."""

from __future__ import annotations

from typing import TypeVar

from drivetrain import ConfigurationError
from drivetrain_lightning._worker import check_strategy

__all__ = ["prepare_trainer"]

T = TypeVar("T")


def prepare_trainer(trainer: T) -> T:
    """Check that a Lightning ``Trainer`` is configured for the worker that created it.

    Args:
        trainer: a ``Trainer`` of ``lightning.pytorch`` or ``pytorch_lightning``.

    Returns:
        The same trainer.

    Raises:
        ConfigurationError: the trainer's strategy or cluster environment is not from this package, or the trainer uses
            devices that do not belong to this worker. The message says what to pass to the ``Trainer``.
        SessionError: called outside a train function.
    """
    if not hasattr(trainer, "strategy"):
        raise ConfigurationError(f"prepare_trainer: expected a Lightning Trainer, got {trainer!r}")
    check_strategy(trainer.strategy)
    return trainer
