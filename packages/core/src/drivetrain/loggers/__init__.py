"""Callbacks that write what is reported: to files, to trackers, and to the console."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.loggers.aim import AimLoggerCallback
    from drivetrain.loggers.comet import CometLoggerCallback
    from drivetrain.loggers.csvfile import CSVLoggerCallback
    from drivetrain.loggers.jsonfile import JsonLoggerCallback
    from drivetrain.loggers.mlflow import MLflowLoggerCallback
    from drivetrain.loggers.progress import ProgressCallback
    from drivetrain.loggers.tensorboard import TBXLoggerCallback
    from drivetrain.loggers.tracker import Entry, TrackerCallback
    from drivetrain.loggers.wandb import WandbLoggerCallback

__all__ = [
    "AimLoggerCallback",
    "CSVLoggerCallback",
    "CometLoggerCallback",
    "Entry",
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "ProgressCallback",
    "TBXLoggerCallback",
    "TrackerCallback",
    "WandbLoggerCallback",
]

_MODULES = {
    "AimLoggerCallback": "aim",
    "CSVLoggerCallback": "csvfile",
    "CometLoggerCallback": "comet",
    "Entry": "tracker",
    "JsonLoggerCallback": "jsonfile",
    "MLflowLoggerCallback": "mlflow",
    "ProgressCallback": "progress",
    "TBXLoggerCallback": "tensorboard",
    "TrackerCallback": "tracker",
    "WandbLoggerCallback": "wandb",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
