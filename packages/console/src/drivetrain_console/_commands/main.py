"""The ``drivetrain`` command.

Exit codes: 0 for success; 1 for a negative result (a failed training, a broken plugin, a damaged checkpoint); 2 for an
invalid request; 3 if the run, metric or checkpoint does not exist; 128 plus the number of the signal that ended the
command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from drivetrain import ConfigurationError, DrivetrainError, PluginError, RunExistsError
from drivetrain_console._commands.output import BAD, MISSING, USAGE, MissingError, json_text, write
from drivetrain_console._commands.parser import make_parser
from drivetrain_console._commands.unknown import explain_unknown

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, and run the command: see :func:`drivetrain_console.main`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser = make_parser(given[0] if given else None)
        chosen = _parse(parser, given)
        if not hasattr(chosen, "handler"):
            getattr(chosen, "usage_of", parser).print_help()
            return USAGE
        status: int = chosen.handler(chosen)
        if sys.stdout is not None:  # otherwise, it is closed
            sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (DrivetrainError, TimeoutError, ModuleNotFoundError) as error:
        if "--json" in given:
            write(json_text({"error": str(error), "type": type(error).__name__}), error=True)
        else:
            write(f"drivetrain: {error}", error=True)
        if isinstance(error, MissingError):
            return MISSING
        return USAGE if isinstance(error, (ConfigurationError, PluginError, RunExistsError)) else BAD
    if hasattr(chosen, "finally_run"):  # a script, whose errors are not those of this command
        return chosen.finally_run() or status
    return status


def _parse(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """Parse the arguments. Those of a script, which follow ``--``, are left to the script.

    Raises:
        ConfigurationError: ``run`` does not know some of the arguments.
    """
    if given[:1] != ["run"]:
        return parser.parse_args(given)
    end = given.index("--") if "--" in given else len(given)
    chosen, unknown = parser.parse_known_args(given[:end])
    if unknown:
        raise ConfigurationError(explain_unknown(given[:end], unknown, chosen.options, chosen.target))
    chosen.script_arguments = given[end + 1 :]
    return chosen
