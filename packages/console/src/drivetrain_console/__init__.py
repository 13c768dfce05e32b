"""The console of drivetrain: the command line, the page of a run, plots, and the progress display.

Each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_console._commands.entry import main
    from drivetrain_console._commands.output import BAD, OK, Commands, add_command, emit, find_run
    from drivetrain_console._progress.progress import ProgressCallback
    from drivetrain_console._views.figures import plot
    from drivetrain_console._views.page import write_page

__all__ = [
    "BAD",
    "OK",
    "Commands",
    "ProgressCallback",
    "add_command",
    "emit",
    "find_run",
    "main",
    "plot",
    "write_page",
]

__version__ = "0.1.0"

_MODULES = {
    "BAD": "_commands.output",
    "OK": "_commands.output",
    "main": "_commands.entry",
    "Commands": "_commands.output",
    "add_command": "_commands.output",
    "emit": "_commands.output",
    "find_run": "_commands.output",
    "ProgressCallback": "_progress.progress",
    "plot": "_views.figures",
    "write_page": "_views.page",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
