"""Forks the server of the local workers from the driver itself, at the head of its script.

A script imports its framework at its top. A server that is started later, by ``fit()``, would have to import it again,
which takes longer than everything else before the training. A process that is forked at the head of the script has the
modules already, and nothing else: the script has not executed any other statement yet. While the driver continues, the
server imports what the frameworks need for their first step: see :attr:`~drivetrain.plugin.Framework.warmup`.

A fork has only the thread that called it. So there is no such server if a module has started a thread that does not
end at a fork, or has opened an accelerator. The fork comes before the import of a package that is known to start
threads; the server then imports the frameworks that follow it, while the driver makes the same imports. ``fit()``
starts the server in all other cases, and also if the script is not executed as the main module, imports modules that
are not installed before drivetrain, or later changes what a process inherits: environment variables that imports may
read, resource limits, its priority or CPUs, users or signals.
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
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from drivetrain._base.head import HeadImport, end_of_head, head_imports
from drivetrain._base.inherited import inherited_settings
from drivetrain._base.interpreter import as_main_script, set_module_path
from drivetrain._plugins.frameworks import installed_frameworks
from drivetrain._runtimes import forkserver
from drivetrain._runtimes.processes import ForkedProcess, fork_process, uses_accelerator
from drivetrain._runtimes.warm import WarmServer, digest_of, find_warm_server, warm_facts
from drivetrain._runtimes.warmserver import BecomeDriver, WarmSettings
from drivetrain._worker.output import flush_output
from drivetrain.errors import WaitTimeoutError

__all__ = ["EarlyServer", "explain_imports", "fork_server", "run_script", "start_warm_server", "take_server"]

_START_THREADS = (
    *("datasets", "deepspeed", "keras", "lightgbm", "mlflow", "pandas", "polars", "pyarrow", "sklearn"),
    *("tensorflow", "transformers", "xgboost"),
)
"""Packages that start threads when imported, often those of pyarrow. The driver imports them after the fork."""

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
        keeps_warm: True if it forks a warm server.
    """

    process: ForkedProcess
    owner: int
    control: socket.socket
    started: float
    environment: dict[str, str]
    inherited: object
    keeps_warm: bool

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


def fork_server(imports: Sequence[HeadImport], warm: WarmSettings | None = None) -> None:
    """Make imports as a script does, and fork a server that has them. Without effect if that is impossible.

    Args:
        imports: the imports at the head of the script that were not made yet. Their errors are raised.
        warm: the settings of the warm server that is forked from this server; None for none.

    Raises:
        BecomeDriver: in a process that was forked from the warm server, to run a script.
    """
    if _attempts or os.environ.get("DRIVETRAIN_EARLY_FORK") == "0" or _is_traced() or _uses_cluster(imports):
        return
    _attempts.append(os.getpid())
    left = [name for each in _make(imports) for name in each.modules]
    if warm is not None:
        modules = tuple(name for each in imports for name in each.modules if name in sys.modules)
        warm = None if _handles_signals() else replace(warm, modules=modules, environment=dict(os.environ))
    with contextlib.suppress(OSError):  # there are too many processes or descriptors: fit() will say so
        if not uses_accelerator() and forkserver.forks_cleanly():
            _unused.append(_fork(_frameworks_among(left), warm))


def _fork(frameworks: Sequence[str], warm: WarmSettings | None) -> EarlyServer:
    flush_output()  # the server would write it again
    environment, inherited, started = dict(os.environ), inherited_settings(), time.time()
    ours, theirs = socket.socketpair()
    driver = os.pidfd_open(os.getpid())  # opened here, because this process may end before the server could do it
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C must not be raised in the child
    try:
        with theirs:
            if (pid := fork_process()) == 0:
                ours.close()
                forkserver.serve_driver(theirs, driver, masked, frameworks, warm)
        server = EarlyServer(ForkedProcess(pid), os.getpid(), ours, started, environment, inherited, warm is not None)
        os.close(driver)
    except OSError:
        ours.close()
        os.close(driver)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    atexit.register(_close_unused)
    return server


def _handles_signals() -> bool:
    """Return True if a module has set a handler, which a driver of a warm server would not have."""
    usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
    return any(signal.getsignal(number) not in usual for number in signal.valid_signals())


def _close_unused() -> None:
    if (server := take_server()) is not None:
        server.control.close()
        if server.keeps_warm:  # it exits when it has forked the warm server
            return
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


def _make(imports: Sequence[HeadImport]) -> Sequence[HeadImport]:
    """Make imports up to the first one that starts threads. Return those that are left."""
    was_enabled = gc.isenabled()
    gc.disable()  # garbage collection takes a tenth of the time of imports
    try:
        for number, each in enumerate(imports):
            if any(_root(name) in _START_THREADS for name in each.modules):
                return imports[number:]
            exec(each.compiled(), {"__name__": "__main__"})
        return []
    finally:
        if was_enabled:
            gc.enable()


def _frameworks_among(modules: Sequence[str]) -> list[str]:
    """Return the frameworks among modules that are left to import, up to a module that may configure a framework."""
    found = []
    known = installed_frameworks()
    for name in modules:
        root = _root(name)
        if root in known and root not in _START_THREADS:
            found.append(name)
        elif root not in (*_START_THREADS, *sys.stdlib_module_names) and root.partition("_")[0] != "drivetrain":
            break
    return found


def _root(module: str) -> str:
    return module.partition(".")[0]


def run_script(path: str, arguments: Sequence[str], keep_s: float = 0.0) -> None:
    """Run a script in this process like ``python script.py``, after the imports at its head and the fork of a server.

    Args:
        path: the path of the script, as the user has given it.
        arguments: its arguments.
        keep_s: the time in seconds for which a warm server is kept after the run; 0 for none.
    """
    warm = _warm_settings(path, keep_s) if keep_s else None
    set_module_path(path)
    try:
        _run_here(path, arguments, warm)
    except BecomeDriver as become:
        driver = become
    else:
        return
    _run_as(driver)


def explain_imports(path: str) -> list[str]:
    """Return which imports of a script a warm server does not keep, and why.

    Args:
        path: the path of the script.

    Raises:
        OSError: the script cannot be read.
    """
    content = Path(path).read_bytes()
    with as_main_script(path):
        modules = [name for each in head_imports(content, path) for name in each.modules]
        end = end_of_head(content)
    found = []
    for package in map(_root, modules):
        if package in _START_THREADS:
            found.append(f"{package} starts threads, so it and the imports after it are made in each run")
            break
    if end is not None:
        found.append(
            f"the imports from line {end} are made in each run, because only imports of installed packages that "
            "precede every other statement are kept"
        )
    return found


def start_warm_server(path: str, keep_s: float) -> WarmServer | None:
    """Start a warm server for a script, without running it. Return None if that is impossible.

    Args:
        path: the path of the script.
        keep_s: the time in seconds for which the server is kept after each run.

    Raises:
        WaitTimeoutError: the imports take too long.
    """
    warm = _warm_settings(path, keep_s)
    set_module_path(path)
    sys.argv = [path]
    try:
        fork_server(head_imports(Path(path).read_bytes(), os.path.abspath(path)), warm)
    except BecomeDriver as become:
        driver = become
    else:
        return None if warm is None else _await_warm_server(digest_of(warm.facts))
    _run_as(driver)
    sys.exit()


def _warm_settings(path: str, keep_s: float) -> WarmSettings | None:
    try:
        return WarmSettings(facts=warm_facts(path), keep_s=keep_s, started=time.time())
    except OSError:  # this process may not read its own settings
        return None


def _await_warm_server(digest: str) -> WarmServer | None:
    early = take_server()
    if early is None:
        return None
    early.control.close()  # so it exits as soon as it has forked the warm server
    try:
        early.process.wait(_WARM_S)
    except subprocess.TimeoutExpired as error:
        early.process.kill()
        raise WaitTimeoutError(f"the imports of the script were not complete after {_WARM_S:.0f} s") from error
    return find_warm_server(digest, limit_s=_WARM_S)


def _run_as(driver: BecomeDriver) -> None:
    """Run a script in this process, which was forked from a warm server."""
    driver.__traceback__ = None  # its frames refer to the objects of the server
    _attempts.clear()
    sys.orig_argv = driver.request.original_arguments
    signal.pthread_sigmask(signal.SIG_SETMASK, driver.signal_mask)
    _run_here(driver.request.path, driver.request.arguments, None)


def _run_here(path: str, arguments: Sequence[str], warm: WarmSettings | None) -> None:
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
        fork_server(head_imports(content, absolute), warm)
        sys.modules["__main__"] = module
        if "__mp_main__" in sys.modules:  # multiprocessing was imported before
            sys.modules["__mp_main__"] = module
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
