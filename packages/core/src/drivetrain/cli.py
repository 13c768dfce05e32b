"""The ``drivetrain`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from drivetrain._version import __version__
from drivetrain.control import ask
from drivetrain.errors import DrivetrainError, PluginError, StorageError
from drivetrain.plugins import KINDS, list_plugins
from drivetrain.storage import RUN_FILE, Storage, locate, runs_location

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what comes after the command's name; None for this process's.

    Returns:
        The exit status: 0, or 1 where a plugin is broken or nothing answers.
    """
    parser = argparse.ArgumentParser(prog="drivetrain", description="Scale a training function to many workers.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugins", help="list installed plugins, and whether they load")
    stacks = commands.add_parser("stacks", help="show where each rank of a run is, with its Python stacks")
    stacks.add_argument("run", help="the run's directory or URI, or its name in the default storage path")
    chosen = parser.parse_args(arguments)
    if chosen.command == "plugins":
        return _plugins()
    try:
        print(_stacks(chosen.run))
    except (DrivetrainError, TimeoutError) as error:
        print(f"drivetrain: {error}", file=sys.stderr)
        return 1
    return 0


def _stacks(run: str) -> str:
    """Where the ranks of a run are, says its driver."""
    if "/" in run:
        storage = Storage(*locate(run, what="drivetrain stacks"))
    else:
        runs = runs_location(None)
        storage = Storage(runs.filesystem, runs.path(run))
    if (data := storage.read_bytes(RUN_FILE)) is None:
        raise StorageError(f"stacks wants the directory of a run, found no {RUN_FILE} in {storage.root}")
    answer = ask(json.loads(data)["id"], "stacks")
    if answer is None:
        raise StorageError(
            f"stacks wants a run whose driver works on this machine, found none for {storage.root}: it has ended, or "
            "its driver is on another machine or another user's"
        )
    return answer


def _plugins() -> int:
    rows = [("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS")]
    broken = 0
    for kind in KINDS:
        installed = list_plugins(kind)
        names = [plugin.name for plugin in installed]
        for plugin in installed:
            status = "installed"
            if names.count(plugin.name) > 1:
                status = "broken: several distributions claim this name"
            else:
                try:
                    plugin.load()
                except PluginError as error:
                    status = f"broken: {error.__cause__!r}"
            broken += status != "installed"
            rows.append((plugin.kind, plugin.name, plugin.distribution, plugin.version, status))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    return 1 if broken else 0
