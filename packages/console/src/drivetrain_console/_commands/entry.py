"""The beginning of the ``drivetrain`` command, which imports little, because a warm server starts a script at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the arguments after the command's name; None for the arguments of this process.

    Returns:
        The exit code; see :mod:`drivetrain_console`.
    """
    if arguments is None and (status := _run_warm(sys.argv[1:])) is not None:
        return status
    from drivetrain_console._commands.main import main as run_command

    return run_command(arguments)


def _run_warm(given: Sequence[str]) -> int | None:
    """Run a script in a driver of a warm server. Return None if there is no server, or the arguments mean another."""
    end = given.index("--") if "--" in given else len(given)
    if given[:1] != ["run"] or not any(option.endswith(".py") for option in given[1:end]):
        return None
    from drivetrain.plugin.warm import KEEP_WARM, run_in_warm_server, seconds_of

    keep, scripts = os.environ.get(KEEP_WARM) or None, []
    options = iter(given[1:end])
    for option in options:
        name, equals, value = option.partition("=")
        if name == "--keep-warm":
            keep = value if equals else next(options, "")
        else:
            scripts.append(option)
    if len(scripts) != 1 or not scripts[0].endswith(".py") or scripts[0].startswith("-"):
        return None
    try:
        keep_s = None if keep is None else seconds_of(keep)
    except ValueError:  # the command explains it
        return None
    return None if keep_s == 0 else run_in_warm_server(scripts[0], given[end + 1 :], keep_s)
