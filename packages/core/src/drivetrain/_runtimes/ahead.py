"""Forks the server of the local workers from the driver itself, at the head of its script.

A script imports its framework at its top. A server that is started later, by ``fit()``, would have to import it again,
which takes longer than everything else before the training. A process that is forked at the head of the script has the
modules already, and nothing else: the script has not executed any other statement yet. While the driver continues, the
server imports what the frameworks need for their first step: see :attr:`~drivetrain.plugin.Framework.warmup`.

A fork has only the thread that called it. So there is no such server if a module has started a thread that does not
end at a fork, or has opened an accelerator. ``fit()`` starts the server in this case, and also if the script is not
executed as the main module, imports modules that are not installed before drivetrain, or later changes what a process
inherits: environment variables that imports may read, resource limits, its priority or CPUs, users or signals.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from drivetrain._base.head import HeadImport, head_imports
from drivetrain._runtimes import forkserver
from drivetrain._runtimes.processes import ForkedProcess, fork_process
from drivetrain._worker.output import flush_output

__all__ = ["EarlyServer", "fork_server", "run_script", "take_server"]

_START_THREADS = (
    *("datasets", "deepspeed", "keras", "lightgbm", "mlflow", "pandas", "polars", "pyarrow", "sklearn"),
    *("tensorflow", "transformers", "xgboost"),
)
"""Packages that start threads when imported, often those of pyarrow. The driver imports them after the fork."""

_ACCELERATORS = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/accel", "/dev/vfio")
_EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class EarlyServer:
    """A server that was forked from this process.

    Attributes:
        process: the process.
        owner: the process id of the driver.
        control: the connection to it.
        started: the time of the fork, as Unix time in seconds.
        environment: the environment variables at that moment.
        inherited: what else it has inherited at that moment.
    """

    process: ForkedProcess
    owner: int
    control: socket.socket
    started: float
    environment: dict[str, str]
    inherited: object

    def has_settings_of_driver(self) -> bool:
        """Return True if a process that the driver started now would inherit the same settings of the system."""
        return self.inherited == _inherited()


_attempts: list[int] = []
"""The process that has tried to fork a server. Its forks do not try again."""

_unused: list[EarlyServer] = []
"""The server that was forked, until it is used."""


def take_server() -> EarlyServer | None:
    """Return the server that was forked from this process, once; None if there is none."""
    try:
        server = _unused.pop()  # atomic, for the case of several threads
    except IndexError:
        return None
    return server if server.owner == os.getpid() else None


def fork_server(imports: Sequence[HeadImport]) -> None:
    """Make imports as a script does, and fork a server that has them. Without effect if that is impossible.

    Args:
        imports: the imports at the head of the script that were not made yet. Their errors are raised.
    """
    if _attempts or os.environ.get("DRIVETRAIN_EARLY_FORK") == "0" or _is_traced() or _uses_cluster(imports):
        return
    _attempts.append(os.getpid())
    _make(imports)
    with contextlib.suppress(OSError):  # there are too many processes or descriptors: fit() will say so
        if not _uses_accelerator() and forkserver.forks_cleanly():
            _unused.append(_fork())


def _fork() -> EarlyServer:
    flush_output()  # the server would write it again
    driver = os.getpid()
    environment, inherited, started = dict(os.environ), _inherited(), time.time()
    ours, theirs = socket.socketpair()
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C must not be raised in the child
    try:
        with theirs:
            if (pid := fork_process()) == 0:
                ours.close()
                forkserver.serve_driver(theirs, driver, masked)
        server = EarlyServer(ForkedProcess(pid), driver, ours, started, environment, inherited)
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    atexit.register(_close_unused)
    return server


def _close_unused() -> None:
    if (server := take_server()) is not None:
        server.control.close()
        server.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # this process may not kill it: see ForkedProcess
            server.process.wait(_EXIT_S)


def _is_traced() -> bool:
    """Return True if a debugger or a profiler follows this process. It would also stop in the workers."""
    tools = getattr(sys, "monitoring", None)
    return bool(sys.gettrace() or sys.getprofile() or (tools is not None and any(map(tools.get_tool, range(6)))))


def _uses_cluster(imports: Sequence[HeadImport]) -> bool:
    """Return True if another runtime will probably start the workers."""
    variables = ("RAY_ADDRESS", "DRIVETRAIN_COMMAND")
    modules = {*sys.modules, *(name for each in imports for name in each.modules)}
    return "ray" in modules or any(name in os.environ for name in variables)


def _uses_accelerator() -> bool:
    """Return True if this process has opened an accelerator. Its drivers do not work in a fork."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the directory itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_ACCELERATORS):
                return True
    return False


def _inherited() -> object:
    """Return the settings of the system that a process inherits from the one that starts it."""
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    return (
        [resource.getrlimit(number) for name, number in vars(resource).items() if name.startswith("RLIMIT_")],
        (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        (os.getresuid(), os.getresgid(), os.getgroups(), signal.pthread_sigmask(signal.SIG_BLOCK, ()), ignored),
        [Path("/proc/self", name).read_bytes() for name in ("cgroup", "oom_score_adj")],
    )


def _make(imports: Sequence[HeadImport]) -> None:
    was_enabled = gc.isenabled()
    gc.disable()  # garbage collection takes a tenth of the time of imports
    try:
        for each in imports:
            if any(name.partition(".")[0] in _START_THREADS for name in each.modules):
                return
            exec(each.compiled(), {"__name__": "__main__"})
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
    content = Path(absolute).read_bytes()
    module = ModuleType("__main__")
    module.__file__ = absolute
    module.__cached__ = None  # type: ignore[attr-defined]
    module.__loader__ = SourceFileLoader("__main__", absolute)
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.argv = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        fork_server(head_imports(content, absolute))
        sys.modules["__main__"] = module
        exec(compile(content, absolute, "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        _show_from(_without_own_frames(error.__traceback__))
        raise


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == __name__:
        traceback = traceback.tb_next
    return traceback


def _show_from(traceback: TracebackType | None) -> None:
    """Make the interpreter show the traceback of an error in the script without the frames of this module."""
    hook = sys.excepthook
    sys.excepthook = lambda kind, error, _: hook(kind, error.with_traceback(traceback), traceback)
