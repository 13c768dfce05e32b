"""The command `drivetrain last`, which prints the latest metrics of a run."""

import argparse

from drivetrain import Result
from drivetrain_console import Commands, add_command, emit, find_run


def add_last(commands: Commands) -> None:
    """Add the command. Called when the `drivetrain` command is started."""
    parser = add_command(
        commands,
        "last",
        _last,
        "print the latest value of each metric",
        "  drivetrain last digits\n  drivetrain last digits --metric loss --json",
    )
    parser.add_argument("run", help="the directory, URI or name of a run")
    parser.add_argument(
        "--metric", action="append", help="print only this metric; may be repeated"
    )


def _last(arguments: argparse.Namespace) -> int:
    run = find_run(arguments.run)
    metrics = Result.from_path(run.root, run.filesystem.handle).metrics
    names = arguments.metric or [name for name in metrics if not name.startswith("_")]
    found = {name: metrics[name] for name in names if name in metrics}
    emit(
        arguments,
        found,
        lambda: "\n".join(f"{name} = {value}" for name, value in found.items()),
    )
    return 0 if len(found) == len(names) else 1
