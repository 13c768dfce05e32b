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
from drivetrain._base.inherited import inherited_settings
from drivetrain._base.interpreter import set_module_path
from drivetrain._runtimes import forkserver
from drivetrain._runtimes.processes import ForkedProcess, fork_process
from drivetrain._runtimes.warm import WarmServer, find_warm_server, run_in_warm_server, warm_digest
from drivetrain._runtimes.warmserver import BecomeDriver, WarmSettings
from drivetrain._worker.output import flush_output
from drivetrain.errors import WaitTimeoutError

__all__ = ["EarlyServer", "fork_server", "run_script", "start_warm_server", "take_server"]

_START_THREADS = (
    *("datasets", "deepspeed", "keras", "lightgbm", "mlflow", "pandas", "polars", "pyarrow", "sklearn"),
    *("tensorflow", "transformers", "xgboost"),
)
"""Packages that start threads when imported, often those of pyarrow. The driver imports them after the fork."""

_ACCELERATORS = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/accel", "/dev/vfio")
_EXIT_S = 5.0
_WARM_S = 300.0


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
        return self.inherited == inherited_settings()


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


def fork_server(imports: Sequence[HeadImport], digest: str | None = None, keep_s: float = 0.0) -> None:
    """Make imports as a script does, and fork a server that has them. Without effect if that is impossible.

    Args:
        imports: the imports at the head of the script that were not made yet. Their errors are raised.
        digest: the digest of the warm server that is forked from this server; None for none.
        keep_s: the time in seconds for which the warm server is kept.

    Raises:
        BecomeDriver: in a process that was forked from the warm server, to run a script.
    """
    if _attempts or os.environ.get("DRIVETRAIN_EARLY_FORK") == "0" or _is_traced() or _uses_cluster(imports):
        return
    _attempts.append(os.getpid())
    _make(imports)
    with contextlib.suppress(OSError):  # there are too many processes or descriptors: fit() will say so
        if not _uses_accelerator() and forkserver.forks_cleanly():
            _unused.append(_fork(imports, digest, keep_s))


def _fork(imports: Sequence[HeadImport], digest: str | None, keep_s: float) -> EarlyServer:
    flush_output()  # the server would write it again
    driver = os.getpid()
    environment, inherited, started = dict(os.environ), inherited_settings(), time.time()
    warm = None
    if digest is not None:
        modules = tuple(name for each in imports for name in each.modules if name in sys.modules)
        warm = WarmSettings(digest=digest, modules=modules, keep_s=keep_s, environment=environment)
    ours, theirs = socket.socketpair()
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C must not be raised in the child
    try:
        with theirs:
            if (pid := fork_process()) == 0:
                ours.close()
                forkserver.serve_driver(theirs, driver, masked, warm)
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


def run_script(path: str, arguments: Sequence[str], keep_s: float | None = None) -> None:
    """Run a script like ``python script.py``, in a driver of a warm server if there is one for it.

    Otherwise, run it in this process, after the imports at its head and the fork of a server.

    Args:
        path: the path of the script, as the user has given it.
        arguments: its arguments.
        keep_s: the time in seconds for which a warm server is kept after the run; 0 to use none, and None to use one
            that exists.
    """
    set_module_path(path)
    digest = None
    if keep_s != 0:
        if (status := run_in_warm_server(path, arguments, keep_s)) is not None:
            sys.exit(status)
        with contextlib.suppress(OSError):  # this is not Linux, or the script cannot be read
            digest = warm_digest(path) if keep_s else None
    try:
        _run_here(path, arguments, digest, keep_s or 0.0)
    except BecomeDriver as become:
        driver = become
    else:
        return
    _run_as(driver)


def start_warm_server(path: str, keep_s: float) -> WarmServer | None:
    """Start a warm server for a script, without running it. Return None if that is impossible.

    Args:
        path: the path of the script.
        keep_s: the time in seconds for which the server is kept after each run.

    Raises:
        WaitTimeoutError: the imports take too long.
    """
    set_module_path(path)
    digest = warm_digest(path)
    try:
        fork_server(head_imports(Path(path).read_bytes(), os.path.abspath(path)), digest, keep_s)
    except BecomeDriver as become:
        driver = become
    else:
        return _await_warm_server(digest)
    _run_as(driver)
    sys.exit()


def _await_warm_server(digest: str) -> WarmServer | None:
    early = take_server()
    if early is None:
        return None
    deadline = time.monotonic() + _WARM_S
    try:
        while early.process.poll() is None:
            if (found := find_warm_server(digest)) is not None:
                return found
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"the imports of the script were not complete after {_WARM_S:.0f} s")
            time.sleep(0.05)
        return None
    finally:
        early.control.close()
        early.process.kill()


def _run_as(driver: BecomeDriver) -> None:
    """Run a script in this process, which was forked from a warm server."""
    driver.__traceback__ = None  # its frames refer to the objects of the server
    _attempts.clear()
    request = driver.request
    set_module_path(request.path)
    signal.pthread_sigmask(signal.SIG_SETMASK, driver.signal_mask)
    _run_here(request.path, request.arguments, None, 0.0)


def _run_here(path: str, arguments: Sequence[str], digest: str | None, keep_s: float) -> None:
    absolute = os.path.abspath(path)
    content = Path(absolute).read_bytes()
    module = ModuleType("__main__")
    module.__file__ = absolute
    module.__cached__ = None  # type: ignore[attr-defined]
    module.__loader__ = SourceFileLoader("__main__", absolute)
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__annotations__ = {}
    sys.argv = [path, *arguments]
    try:
        fork_server(head_imports(content, absolute), digest, keep_s)
        sys.modules["__main__"] = module
        exec(compile(content, absolute, "exec", dont_inherit=True), vars(module))
    except (BecomeDriver, SystemExit):
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
