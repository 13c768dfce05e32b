"""Reads runs, finished or running, from their directories: with it, programs see what the console shows."""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain.runs._curves import Curve, CurveReader, choose_curves
    from drivetrain.runs._history import Attempt, History
    from drivetrain.runs._reader import RunReader, list_runs, open_run, readers_in
    from drivetrain.runs._records import RunRecord
else:
    _SOURCES = {
        "drivetrain.runs._curves": "choose_curves Curve CurveReader",
        "drivetrain.runs._history": "Attempt History",
        "drivetrain.runs._reader": "list_runs open_run readers_in RunReader",
        "drivetrain.runs._records": "RunRecord",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = [
    "Attempt",
    "Curve",
    "CurveReader",
    "History",
    "RunReader",
    "RunRecord",
    "choose_curves",
    "list_runs",
    "open_run",
    "readers_in",
]
