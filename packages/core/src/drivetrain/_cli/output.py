"""What the commands share: how results and errors are shown, and how a run is found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain._base.printable import printable_text
from drivetrain._base.redact import redact
from drivetrain._storage.directory import Storage, runs_location
from drivetrain._storage.layout import RUN_FILE
from drivetrain._storage.remote import locate
from drivetrain._views.page import plain
from drivetrain.errors import DrivetrainError

__all__ = [
    "BAD",
    "MISSING",
    "OK",
    "USAGE",
    "Commands",
    "MissingError",
    "add_command",
    "add_json",
    "emit",
    "find_run",
    "find_storage",
    "json_text",
    "write",
]

OK, BAD, USAGE, MISSING = 0, 1, 2, 3
"""Exit statuses: done; done, and the answer is bad; asked for what cannot be; there is no such run or thing."""

Commands = Any  # what argparse's add_subparsers() returns, whose class has no public name


class MissingError(DrivetrainError):
    """There is no such run, metric or checkpoint."""


def add_command(
    commands: Commands, name: str, handler: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command with its help, and the option ``--json``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    add_json(parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def emit(arguments: argparse.Namespace, data: Any, text: Callable[[], str], *, colored: bool = False) -> None:
    """Print a result: as JSON if that was asked for, and else as text."""
    write(json_text(plain(data)) if arguments.json else text(), colored=colored)


def json_text(data: Any) -> str:
    """Return a document as JSON whose decoded strings contain no control characters."""
    return json.dumps(_cleaned(data))


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {printable_text(str(name)): _cleaned(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return printable_text(str(value))


def write(text: str, *, error: bool = False, colored: bool = False, show_secrets: bool = False) -> None:
    """Print text. All commands print through this function, as text may come from someone else's run directory.

    Control characters, such as those of terminal escapes, and credentials in URIs are removed.

    Args:
        text: the text, without the end of its last line.
        error: print to the standard error.
        colored: keep the colors of a plot.
        show_secrets: keep credentials: the text is the address of our own server.
    """
    text = printable_text(text, colored=colored)
    print(text if show_secrets else redact(text), file=sys.stderr if error else sys.stdout, flush=True)


def find_storage(path: str | None) -> Storage:
    """Return the directory of runs that was named, or the default one."""
    return runs_location(path)


def find_run(run: str) -> Storage:
    """Return the directory of a run.

    Args:
        run: its directory or URI; or its name, in the default storage path or the working directory.

    Raises:
        MissingError: there is no run.
    """
    places = []
    if "/" not in run:
        runs = runs_location(None)
        places.append(Storage(runs.filesystem, runs.path(run)))
    places.append(Storage(*locate(run, what="the run")))
    for storage in places:
        if storage.exists(RUN_FILE):
            return storage
    looked = " and ".join(storage.root for storage in places)
    raise MissingError(f"expected the directory or the name of a run, found no {RUN_FILE} in {looked}")
