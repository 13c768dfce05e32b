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

from drivetrain._cli.checkpoints import add_checkpoints
from drivetrain._cli.doctor import add_doctor
from drivetrain._cli.explain import add_explain
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
from drivetrain._hooks.plugins import KINDS, check_plugin, find_misspelled_groups, list_plugins
from drivetrain._storage.layout import RUN_FILE
from drivetrain._version import __version__
from drivetrain._views.terminal import table
from drivetrain.errors import ConfigurationError, DrivetrainError, PluginError, RunExistsError, StorageError

__all__ = ["main", "make_parser"]

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the arguments after the command's name; None for the arguments of this process.

    Returns:
        The exit code; see :mod:`drivetrain._cli`.
    """
    parser = make_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"] and "--" in given:  # otherwise argparse would parse the options of the script, too
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
    except BrokenPipeError:  # the program that reads the output closed the pipe
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
    """Return the parser for all commands."""
    parser = argparse.ArgumentParser(
        prog="drivetrain",
        description="Run a training function on many workers, and inspect its runs.",
        epilog="drivetrain COMMAND --help shows the options and examples of a command.",
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    add_run(commands)
    add_runs(commands)
    add_checkpoints(commands)
    _add_stacks(commands)
    add_doctor(commands)
    add_explain(commands)
    _add_plugins(commands)
    _add_completion(commands)
    return parser


def _add_stacks(commands: Commands) -> None:
    parser = add_command(
        commands,
        "stacks",
        _stacks,
        "show what each rank of a run is doing, with its Python stacks",
        "  drivetrain stacks my_run\n  drivetrain stacks ~/drivetrain_results/my_run",
    )
    parser.add_argument("run", help="the run's directory or URI, or its name in the default storage path")


def _stacks(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    facts = storage.read_json(RUN_FILE)
    stacks = None if facts is None else ask(facts.text("id"), "stacks")
    if stacks is None:
        raise StorageError(
            f"stacks: expected a run whose driver is running on this machine, got {storage.root}. Its driver "
            "has ended, or belongs to another machine or user"
        )
    emit(arguments, {"run": storage.root, "stacks": stacks}, lambda: stacks)
    return OK


def _add_plugins(commands: Commands) -> None:
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


def _add_completion(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        _completion,
        "print the completion script for a shell",
        "  drivetrain completion bash > ~/.local/share/bash-completion/completions/drivetrain\n"
        "  drivetrain completion zsh > ~/.zfunc/_drivetrain",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'completion requires shtab, which is not installed. Run: pip install "drivetrain[completion]"',
            name=error.name,
        ) from error

    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise ConfigurationError(
            f"completion: expected a shell that the installed shtab supports ({known}), got {arguments.shell}. "
            "Run: pip install --upgrade shtab"
        )
    script = shtab.complete(make_parser(), arguments.shell)
    emit(arguments, {"shell": arguments.shell, "script": script}, lambda: script)
    return OK
