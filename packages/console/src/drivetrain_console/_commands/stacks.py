"""``drivetrain stacks``: shows what the ranks of a running run are doing."""

from __future__ import annotations

import argparse

from drivetrain import StorageError
from drivetrain.plugin.drivers import ask
from drivetrain.plugin.files import RUN_FILE
from drivetrain_console._commands.output import OK, Commands, add_command, emit, find_run

__all__ = ["add_stacks"]


def add_stacks(commands: Commands) -> None:
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
