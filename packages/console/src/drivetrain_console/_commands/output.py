"""Functions that all commands use: they print results and errors, and find runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import DrivetrainError
from drivetrain.plugin.callbacks import printable_text, redact
from drivetrain.plugin.files import RUN_FILE
from drivetrain.plugin.storage import Storage, locate, runs_location
from drivetrain_console._views.page import plain

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
"""The exit codes: success; negative result; invalid request; missing run, metric or checkpoint."""

Commands = Any  # the return type of argparse's add_subparsers(), which has no public name


class MissingError(DrivetrainError):
    """The run, metric or checkpoint does not exist."""


def add_command(
    commands: Commands, name: str, handler: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command with the option ``--json``.

    Args:
        commands: the commands to add it to.
        name: the name of the command.
        handler: runs the command, and returns the exit code.
        summary: a description of the command in one line, which begins with a lower-case letter.
        example: the examples in the help of the command.
    """
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
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def emit(arguments: argparse.Namespace, data: Any, text: Callable[[], str], *, colored: bool = False) -> None:
    """Print the result of a command: as JSON with ``--json``, otherwise as text.

    Args:
        arguments: the parsed arguments of the command.
        data: the result, for JSON.
        text: returns the result as text.
        colored: keep the colors of a plot in the text.
    """
    if arguments.json:
        write(json_text(plain(data)), show_secrets=True)  # they are replaced already
    else:
        write(text(), colored=colored)


def json_text(data: Any) -> str:
    """Return data as JSON, without credentials and without control characters other than tabs and newlines.

    Credentials are replaced in the strings and not in the JSON, whose quotes could be part of a match.
    """
    return json.dumps(_cleaned(data))


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {printable_text(str(name)): _cleaned(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return redact(printable_text(str(value)))


def write(text: str, *, error: bool = False, colored: bool = False, show_secrets: bool = False) -> None:
    """Print text. All commands use this function, because text may come from an untrusted run directory.

    Control characters, such as those of terminal escapes, and credentials are replaced.

    Args:
        text: the text, without the final line end.
        error: print to stderr instead of stdout.
        colored: keep the colors of a plot.
        show_secrets: keep credentials. Only for JSON without them, and for the address of the server that this command
            starts.
    """
    text = printable_text(text, colored=colored)
    print(text if show_secrets else redact(text), file=sys.stderr if error else sys.stdout, flush=True)


def find_storage(path: str | None) -> Storage:
    """Return the directory of runs at a path or URI; None selects the default directory."""
    return runs_location(path)


def find_run(run: str) -> Storage:
    """Return the run directory of a run.

    Args:
        run: the path or URI of the run directory, or its name in the default storage path or the working directory.

    Raises:
        MissingError: there is no such run.
    """
    candidates = []
    if "/" not in run:
        runs = runs_location(None)
        candidates.append(Storage(runs.filesystem, runs.path(run)))
    candidates.append(Storage(*locate(run, what="the run")))
    for storage in candidates:
        if storage.exists(RUN_FILE):
            return storage
    searched = " and ".join(storage.root for storage in candidates)
    raise MissingError(f"{run}: expected the directory or name of a run, but there is no {RUN_FILE} in {searched}")
