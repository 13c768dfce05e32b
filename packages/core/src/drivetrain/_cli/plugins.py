"""``drivetrain plugins``: lists the installed plugins, and checks each of them."""

from __future__ import annotations

import argparse

from drivetrain._cli.output import BAD, OK, Commands, add_command, emit
from drivetrain._hooks.plugins import KINDS, check_plugin, find_misspelled_groups, list_plugins
from drivetrain._views.terminal import table
from drivetrain.errors import PluginError

__all__ = ["add_plugins"]


def add_plugins(commands: Commands) -> None:
    add_command(
        commands,
        "plugins",
        _plugins,
        "list the installed plugins and check each of them; exit code 1 if one cannot be used",
        "  drivetrain plugins",
    )


def _plugins(arguments: argparse.Namespace) -> int:
    columns = ("kind", "name", "distribution", "version", "requires", "status")
    rows = []
    for kind in KINDS:
        installed = list_plugins(kind)
        names = [plugin.name for plugin in installed]
        for plugin in installed:
            status = "installed"
            if names.count(plugin.name) > 1:
                status = "broken: several distributions register this name"
            else:
                try:
                    check_plugin(plugin)
                except PluginError as error:
                    status = f"broken: {repr(error.__cause__) if error.__cause__ else error}"
            rows.append(
                {
                    "kind": plugin.kind,
                    "name": plugin.name,
                    "distribution": plugin.distribution,
                    "version": plugin.version,
                    "requires": plugin.required_version(),
                    "status": status,
                }
            )
    for distribution, group, closest in find_misspelled_groups():
        status = f"ignored: unknown group {group!r}. Did you mean {closest!r}?"
        rows.append(dict.fromkeys(columns, "") | {"distribution": distribution, "status": status})
    header = [column.upper() for column in columns]
    emit(arguments, rows, lambda: table(header, [list(row.values()) for row in rows]))
    return OK if all(row["status"] == "installed" for row in rows) else BAD
