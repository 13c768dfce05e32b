"""``drivetrain completion``: prints the completion script for a shell."""

from __future__ import annotations

import argparse

from drivetrain import ConfigurationError
from drivetrain_console._commands.output import OK, Commands, add_command, emit
from drivetrain_console._commands.parser import make_parser

__all__ = ["add_completion"]

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_completion(commands: Commands) -> None:
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
