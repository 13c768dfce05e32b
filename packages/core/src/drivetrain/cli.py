"""The ``drivetrain`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drivetrain._version import __version__
from drivetrain.errors import PluginError
from drivetrain.plugins import KINDS, list_plugins

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what comes after the command's name; None for this process's.

    Returns:
        The exit status: 0, or 1 where a plugin is broken.
    """
    parser = argparse.ArgumentParser(prog="drivetrain", description="Scale a training function to many workers.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugins", help="list installed plugins, and whether they load")
    parser.parse_args(arguments)
    return _plugins()


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
