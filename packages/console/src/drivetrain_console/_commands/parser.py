"""The parser of the ``drivetrain`` command. Its commands are plugins, also the built-in ones."""

from __future__ import annotations

import argparse

from drivetrain import __version__
from drivetrain.plugin import load_plugin
from drivetrain.plugin.checks import text_of
from drivetrain.plugin.installed import PROVIDERS, list_plugins

__all__ = ["make_parser"]


def make_parser(selected: str | None = None) -> argparse.ArgumentParser:
    """Return the parser.

    Args:
        selected: the name of the only command to add, so that the plugins of other commands are not imported. If it is
            None, or no plugin provides it, all commands are added. A command that cannot be loaded is then listed with
            the reason.

    Raises:
        PluginError: the selected command cannot be loaded, or is in a package that is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="drivetrain",
        description="Run a training function on many workers, and inspect its runs.",
        epilog="drivetrain COMMAND --help shows the options and examples of a command.",
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    names = list(dict.fromkeys(plugin.name for plugin in list_plugins("command")))
    if selected is not None and (selected in names or ("command", selected) in PROVIDERS):
        load_plugin("command", selected)(commands)
        return parser
    for name in names:
        try:
            load_plugin("command", name)(commands)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # another package may raise anything
            if name not in commands.choices:
                commands.add_parser(name, help=f"cannot be used: {text_of(error)}".replace("%", "%%"))
    return parser
