"""``drivetrain plugins``: lists what each installed distribution provides, and checks each plugin."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from drivetrain import __version__
from drivetrain.plugin import API_VERSION
from drivetrain.plugin.installed import CORE, KINDS, Plugin, check_plugins, find_unknown_groups
from drivetrain_console._commands.output import BAD, OK, Commands, add_command, emit
from drivetrain_console._views.terminal import wrapped

__all__ = ["add_plugins"]

_INSTALLED = "installed"
_KIND_WIDTH = max(map(len, KINDS))


def add_plugins(commands: Commands) -> None:
    add_command(
        commands,
        "plugins",
        _plugins,
        "list the installed plugins and check each of them; exit code 1 if one cannot be used",
        "  drivetrain plugins",
    )


def _plugins(arguments: argparse.Namespace) -> int:
    rows = [*_installed(), *_ignored()]
    emit(arguments, rows, lambda: "\n".join(_describe(rows)))
    return OK if all(row["status"] == _INSTALLED for row in rows) else BAD


def _installed() -> Iterator[dict[str, Any]]:
    for plugin, error in check_plugins():
        required = plugin.required_version()
        yield {
            "kind": plugin.kind,
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "requires": required,
            "api": _api_version(plugin, required),
            "status": _INSTALLED if error is None else f"broken: {error}",
        }


def _api_version(plugin: Plugin, required: str) -> int | None:
    """Return the version of the plugin API for which a distribution was built; None if its metadata does not say.

    A release of drivetrain has one version of the API, so a distribution that requires releases like this one was built
    for the API of this release.
    """
    from packaging.specifiers import SpecifierSet

    own = plugin.distribution == CORE
    accepted = bool(required) and SpecifierSet(required).contains(__version__, prereleases=True)
    return API_VERSION if own or accepted else None


def _ignored() -> Iterator[dict[str, Any]]:
    for group in find_unknown_groups():
        yield {
            **dict.fromkeys(("kind", "name", "version", "requires"), ""),
            "distribution": group.distribution,
            "api": None,
            "status": f"ignored: unknown group {group.name!r}. {group.advice}",
        }


def _describe(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines for the terminal: each distribution with its plugins, and then its problems."""
    yield f"drivetrain {__version__} has version {API_VERSION} of the plugin API"

    def distribution(row: Mapping[str, Any]) -> str:
        return str(row["distribution"])

    for name, group in groupby(sorted(rows, key=distribution), distribution):
        of_distribution = list(group)
        first = max(of_distribution, key=lambda row: bool(row["version"]))
        yield ""
        yield " ".join(filter(None, (name, first["version"]))) + _requirement(first)
        for kind in KINDS:
            usable = [row["name"] for row in of_distribution if (row["kind"], row["status"]) == (kind, _INSTALLED)]
            if usable:
                yield wrapped(f"  {kind:{_KIND_WIDTH}}  ", ", ".join(usable))
        for row in of_distribution:
            if row["status"] != _INSTALLED:
                subject = f"{row['kind']} {row['name']} is " if row["kind"] else ""
                yield wrapped("  ! ", f"{subject}{row['status']}")
    problems = sum(row["status"] != _INSTALLED for row in rows)
    yield ""
    if problems:
        yield f"{problems} {'problem' if problems == 1 else 'problems'}, marked with !"
    else:
        yield f"all {len(rows)} plugins can be used"


def _requirement(row: Mapping[str, Any]) -> str:
    if row["distribution"] == CORE or not row["version"]:
        return ""
    required = ",".join(sorted(row["requires"].split(","), reverse=True)) or " of any version"
    return f" (requires drivetrain{required}, API {row['api'] or 'unknown'})"
