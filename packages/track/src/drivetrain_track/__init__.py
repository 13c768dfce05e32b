"""The base class of trackers, and callbacks for experiment trackers. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_track._entries import Entry, Ranks
    from drivetrain_track._tracker import TrackerCallback, numbers, parameters
    from drivetrain_track.aim import AimLoggerCallback
    from drivetrain_track.comet import CometLoggerCallback
    from drivetrain_track.mlflow import MLflowLoggerCallback
    from drivetrain_track.tensorboard import TBXLoggerCallback
    from drivetrain_track.wandb import WandbLoggerCallback

__all__ = [
    "AimLoggerCallback",
    "CometLoggerCallback",
    "Entry",
    "MLflowLoggerCallback",
    "Ranks",
    "TBXLoggerCallback",
    "TrackerCallback",
    "WandbLoggerCallback",
    "numbers",
    "parameters",
]

__version__ = "0.1.0"

_MODULES = {
    "Entry": "_entries",
    "Ranks": "_entries",
    "TrackerCallback": "_tracker",
    "numbers": "_tracker",
    "parameters": "_tracker",
    "AimLoggerCallback": "aim",
    "CometLoggerCallback": "comet",
    "MLflowLoggerCallback": "mlflow",
    "TBXLoggerCallback": "tensorboard",
    "WandbLoggerCallback": "wandb",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
