"""Callbacks that write reports to files in the run directory."""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain.loggers.csvfile import CSVLoggerCallback
    from drivetrain.loggers.jsonfile import JsonLoggerCallback
    from drivetrain.loggers.parquetfile import ParquetLoggerCallback
else:
    _SOURCES = {
        "drivetrain.loggers.csvfile": "CSVLoggerCallback",
        "drivetrain.loggers.jsonfile": "JsonLoggerCallback",
        "drivetrain.loggers.parquetfile": "ParquetLoggerCallback",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = ["CSVLoggerCallback", "JsonLoggerCallback", "ParquetLoggerCallback"]
