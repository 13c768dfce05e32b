"""Makes a worker process join a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from drivetrain._base.interpreter import INSTALLED
from drivetrain._wire.commands import JoinRun
from drivetrain._worker.output import WorkerOutput

__all__ = ["join_run", "update_environment"]


def join_run(command: JoinRun, output: WorkerOutput) -> bool:
    """Perform a :class:`~drivetrain._wire.commands.JoinRun` command.

    Returns:
        True if the process has imported modules that are out of date.
    """
    os.environ.update(command.environment)
    for name, value in command.defaults.items():
        os.environ.setdefault(name, value)
    sys.path.extend(entry for entry in command.module_path if entry not in sys.path)
    if not command.keeps_output:
        _redirect(command, output)
    return command.imported_since is not None and _uses_old_modules(command.imported_since)


def _redirect(command: JoinRun, output: WorkerOutput) -> None:
    directory = command.log_directory
    if directory is not None and not directory.parent.exists():
        directory = None
    if directory is not None or command.shown or command.log_directory is None:
        output.redirect(directory, command.rank, shown=command.shown)


def update_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(variables)


def _uses_old_modules(since: float) -> bool:
    """Return True if the file of an imported module was changed after a Unix time. Installed packages are ignored."""
    folders = [os.path.join(entry or os.getcwd(), "") for entry in sys.path]
    editable = tuple(folder for folder in folders if not any(name in folder for name in INSTALLED))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return any(_changed_since(file, since) for file in files if isinstance(file, str) and file.startswith(editable))


def _changed_since(file: str, since: float) -> bool:
    try:
        return not any(name in file for name in INSTALLED) and os.stat(file).st_mtime > since
    except OSError:
        return False
