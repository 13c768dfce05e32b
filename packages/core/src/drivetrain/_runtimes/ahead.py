"""Forks the server of the local workers from the driver itself, at the head of its script.

A script imports its framework at its top. A server that is started later, by ``fit()``, would have to import it again,
which takes longer than everything else before the training. A process that is forked at the head of the script has the
modules already, and nothing else: the script has not executed any other statement yet.

While the driver continues, the server imports what the frameworks need for their first step: see
:attr:`~drivetrain.plugin.Framework.warmup`.

A fork has only the thread that called it. So there is no such server if a module has started a thread that does not
end at a fork. It is started by ``fit()`` in this case, and also if the script is not executed as the main module, or
imports modules that are not installed before drivetrain.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from drivetrain._base.head import head_imports
from drivetrain._runtimes import forkserver
from drivetrain._runtimes.processes import ForkedProcess, fork_process
from drivetrain._worker.output import flush_output

__all__ = ["EarlyServer", "fork_server", "run_script", "take_server"]

_START_THREADS = (
    "datasets",
    "keras",
    "lightning",
    "pandas",
    "polars",
    "pyarrow",
    "pytorch_lightning",
    "ray",
    "tensorflow",
)
"""Packages that start threads when they are imported, which they do after the fork: in the driver and in the server."""

_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/accel", "/dev/vfio")


@dataclass(slots=True)
class EarlyServer:
    """A server that was forked from this process.

    Attributes:
        pid: its process id.
        owner: the process id of the driver.
        control: the connection to it.
        environment: the environment variables at that moment.
        is_taken: True if it is in use, or was.
    """

    pid: int
    owner: int
    control: socket.socket
    environment: dict[str, str]
    is_taken: bool = False


_forked: list[EarlyServer] = []
"""The server that this process has forked."""


def take_server() -> EarlyServer | None:
    """Return the server that was forked from this process, once; None if there is none."""
    if not _forked or _forked[0].owner != os.getpid() or _forked[0].is_taken:
        return None
    _forked[0].is_taken = True
    return _forked[0]


def fork_server(modules: Sequence[str]) -> None:
    """Import modules as a script does, and fork a server that has them. Without effect if that is impossible.

    Args:
        modules: the modules at the head of the script that are not imported yet.
    """
    if _forked or os.environ.get("DRIVETRAIN_EARLY_FORK") == "0":  # a worker has inherited this list
        return
    _import_all(modules)
    if _uses_accelerator() or not forkserver.forks_cleanly():
        return
    flush_output()  # the server would write it again
    ours, theirs = socket.socketpair()
    driver = os.getpid()
    early = EarlyServer(0, driver, ours, dict(os.environ))
    _forked.append(early)
    early.pid = fork_process()
    if early.pid == 0:
        ours.close()
        forkserver.serve_driver(theirs, driver)
    theirs.close()
    atexit.register(_close, early)


def _close(server: EarlyServer) -> None:
    """End a server that was not needed."""
    if not server.is_taken and server.owner == os.getpid():
        server.control.close()
        ForkedProcess(server.pid).kill()


def _uses_accelerator() -> bool:
    """Return True if this process has opened an accelerator. Its drivers do not work in a fork."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the directory itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_ACCELERATORS):
                return True
    return False


def _import_all(modules: Sequence[str]) -> None:
    was_enabled = gc.isenabled()
    gc.disable()  # garbage collection takes a tenth of the time of imports
    try:
        for name in modules:
            if name.partition(".")[0] in _START_THREADS:
                return
            with contextlib.suppress(Exception):  # the script will raise it
                importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script in this process like ``python script.py``, after the imports at its head and the fork of a server.

    Args:
        path: the path of the script, as the user has given it.
        arguments: its arguments.
    """
    absolute = os.path.abspath(path)
    with open(absolute, "rb") as file:
        content = file.read()
    module = ModuleType("__main__")
    module.__file__ = absolute
    module.__loader__ = SourceFileLoader("__main__", absolute)
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.argv = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    fork_server([name for each in head_imports(content) for name in each.modules])
    sys.modules["__main__"] = module
    try:
        exec(compile(content, absolute, "exec"), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        _show_from(error.__traceback__.tb_next if error.__traceback__ else None)
        raise


def _show_from(traceback: TracebackType | None) -> None:
    """Make the interpreter show the traceback of an error in the script without the frames of this module."""
    hook = sys.excepthook
    sys.excepthook = lambda kind, error, _: hook(kind, error.with_traceback(traceback), traceback)
