"""``prepare_trainer``, which checks a trainer before training."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from drivetrain import ConfigurationError
from drivetrain_lightning._worker import check_strategy

__all__ = ["prepare", "prepare_trainer"]

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


def prepare(value: Any) -> Any:
    """Prepare a ``Trainer`` for :func:`drivetrain.prepare`.

    Raises:
        ConfigurationError: the object is a module or a data module, which a ``Trainer`` prepares itself.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if (package := sys.modules.get(name)) is None:
            continue
        if isinstance(value, package.Trainer):
            return prepare_trainer(value)
        if isinstance(value, (package.LightningModule, package.LightningDataModule)):
            raise ConfigurationError(
                f"prepare(): expected a Lightning Trainer, got {type(value).__name__}, which the Trainer moves and "
                "wraps itself. Prepare the Trainer"
            )
    return NotImplemented
