"""The ``drivetrain`` command.

Exit statuses: 0 done; 1 done, and the answer is bad (a training that failed, a broken plugin, a damaged checkpoint);
2 asked for what cannot be; 3 there is no such run, metric or checkpoint; 128 and a signal's number when ended by it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from drivetrain._cli.checkpoints import add_checkpoints
from drivetrain._cli.doctor import add_doctor
from drivetrain._cli.output import (
    BAD,
    MISSING,
    OK,
    USAGE,
    Commands,
    MissingError,
    add_command,
    emit,
    find_run,
    json_text,
    write,
)
from drivetrain._cli.run import add_run
from drivetrain._cli.runs import add_runs
from drivetrain._driver.control import ask
from drivetrain._hooks.plugins import KINDS, list_plugins
from drivetrain._storage.layout import RUN_FILE
from drivetrain._version import __version__
from drivetrain._views.terminal import table
from drivetrain.errors import ConfigurationError, DrivetrainError, PluginError, RunExistsError, StorageError

__all__ = ["main", "make_parser"]

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what comes after the command's name; None for this process's.

    Returns:
        The exit status; see :mod:`drivetrain._cli`.
    """
    parser = make_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"] and "--" in given:  # argparse would take a script's options for its own
        end = given.index("--")
        chosen = parser.parse_args(given[:end])
        chosen.script_arguments = given[end + 1 :]
    else:
        chosen = parser.parse_args(given)
    if not hasattr(chosen, "handler"):
        getattr(chosen, "usage_of", parser).print_help()
        return USAGE
    try:
        status: int = chosen.handler(chosen)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (DrivetrainError, TimeoutError, ModuleNotFoundError) as error:
        if chosen.json:
            write(json_text({"error": str(error), "type": type(error).__name__}), error=True)
        else:
            write(f"drivetrain: {error}", error=True)
        if isinstance(error, MissingError):
            return MISSING
        return USAGE if isinstance(error, (ConfigurationError, PluginError, RunExistsError)) else BAD


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="drivetrain",
        description="Run a training function on many workers, and look at what has become of it.",
        epilog="drivetrain COMMAND --help has the options and examples of each.",
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    add_run(commands)
    add_runs(commands)
    add_checkpoints(commands)
    _add_stacks(commands)
    add_doctor(commands)
    _add_plugins(commands)
    _add_completion(commands)
    return parser


def _add_stacks(commands: Commands) -> None:
    parser = add_command(
        commands,
        "stacks",
        _stacks,
        "show where each rank of a run is, with its Python stacks",
        "  drivetrain stacks my_run\n  drivetrain stacks ~/drivetrain_results/my_run",
    )
    parser.add_argument("run", help="the run's directory or URI, or its name in the default storage path")


def _stacks(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    facts = storage.read_json(RUN_FILE)
    answer = None if facts is None else ask(facts.text("id"), "stacks")
    if answer is None:
        raise StorageError(
            f"stacks: expected a run whose driver works on this machine, found none for {storage.root}: it has "
            "ended, or "
            "its driver is on another machine or another user's"
        )
    emit(arguments, {"run": storage.root, "stacks": answer}, lambda: answer)
    return OK


def _add_plugins(commands: Commands) -> None:
    add_command(
        commands,
        "plugins",
        _plugins,
        "list installed plugins, and whether they load; status 1 if one does not",
        "  drivetrain plugins",
    )


def _plugins(arguments: argparse.Namespace) -> int:
    found = []
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
            found.append(
                {
                    "kind": plugin.kind,
                    "name": plugin.name,
                    "distribution": plugin.distribution,
                    "version": plugin.version,
                    "status": status,
                }
            )
    header = ["KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"]
    emit(arguments, found, lambda: table(header, [list(one.values()) for one in found]))
    return OK if all(one["status"] == "installed" for one in found) else BAD


def _add_completion(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        _completion,
        "print the script that has a shell complete this command",
        "  drivetrain completion bash > ~/.local/share/bash-completion/completions/drivetrain\n"
        "  drivetrain completion zsh > ~/.zfunc/_drivetrain",
    )
    parser.add_argument("shell", choices=_SHELLS, help="for which")


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'completion requires shtab, which is not installed: run pip install "drivetrain[completion]"',
            name=error.name,
        ) from error

    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise ConfigurationError(
            f"completion: expected a shell that the installed shtab knows ({known}): upgrade shtab"
        )
    script = shtab.complete(make_parser(), arguments.shell)
    emit(arguments, {"shell": arguments.shell, "script": script}, lambda: script)
    return OK
