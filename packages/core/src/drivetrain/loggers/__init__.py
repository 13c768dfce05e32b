"""Callbacks that write reports to files and to the console, and the base class of trackers."""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain.loggers.csvfile import CSVLoggerCallback
    from drivetrain.loggers.entries import Entry
    from drivetrain.loggers.jsonfile import JsonLoggerCallback
    from drivetrain.loggers.progress import ProgressCallback
    from drivetrain.loggers.tracker import TrackerCallback
else:
    _SOURCES = {
        "drivetrain.loggers.csvfile": "CSVLoggerCallback",
        "drivetrain.loggers.entries": "Entry",
        "drivetrain.loggers.jsonfile": "JsonLoggerCallback",
        "drivetrain.loggers.progress": "ProgressCallback",
        "drivetrain.loggers.tracker": "TrackerCallback",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = ["CSVLoggerCallback", "Entry", "JsonLoggerCallback", "ProgressCallback", "TrackerCallback"]
