"""The interactive trainer: one group of workers for several runs, for example in a notebook.

It is a front end of :class:`~drivetrain.DataParallelTrainer`: every run is a run of a ``DataParallelTrainer``, with the
same storage, callbacks and recovery.

"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_interactive._callbacks import TrainingCallback
    from drivetrain_interactive._dicts import load_checkpoint, save_checkpoint
    from drivetrain_interactive._iterator import TrainingIterator
    from drivetrain_interactive._ranks import local_rank, world_rank, world_size
    from drivetrain_interactive._trainer import CheckpointStrategy, Trainer

__all__ = [
    "CheckpointStrategy",
    "Trainer",
    "TrainingCallback",
    "TrainingIterator",
    "load_checkpoint",
    "local_rank",
    "save_checkpoint",
    "world_rank",
    "world_size",
]

__version__ = "0.1.0"

_MODULES = {
    "TrainingCallback": "_callbacks",
    "load_checkpoint": "_dicts",
    "save_checkpoint": "_dicts",
    "TrainingIterator": "_iterator",
    "local_rank": "_ranks",
    "world_rank": "_ranks",
    "world_size": "_ranks",
    "CheckpointStrategy": "_trainer",
    "Trainer": "_trainer",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
