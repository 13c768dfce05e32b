"""How the interpreter of this process was started, and where packages are installed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["INSTALLED", "as_main_script", "interpreter_options", "is_in_site", "set_module_path"]

INSTALLED = ("site-packages", "dist-packages")
"""The names of the directories of installed packages."""

_OPTIONS = {
    "debug": "-d",
    "optimize": "-O",
    "dont_write_bytecode": "-B",
    "no_user_site": "-s",
    "ignore_environment": "-E",
    "verbose": "-v",
    "bytes_warning": "-b",
    "isolated": "-I",
}


def interpreter_options() -> list[str]:
    """Return the options of the command line with which this interpreter was started."""
    options = [option for flag, option in _OPTIONS.items() for _ in range(int(getattr(sys.flags, flag)))]
    for name, value in sys._xoptions.items():
        options += ["-X", name if value is True else f"{name}={value}"]
    return [*options, *(f"-W{option}" for option in sys.warnoptions)]


def is_in_site(path: str) -> bool:
    """Return True for a file or directory of installed packages."""
    return any(part in INSTALLED for part in path.split(os.sep))


def set_module_path(script: str) -> None:
    """Make the directory of a script the first one from which modules are imported, as the interpreter does."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))


@contextlib.contextmanager
def as_main_script(script: str) -> Iterator[None]:
    """Set the module path of a script while the context is active."""
    before = sys.path[:]
    set_module_path(script)
    try:
        yield
    finally:
        sys.path[:] = before
