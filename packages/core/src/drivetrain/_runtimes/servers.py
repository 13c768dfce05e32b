"""The driver's side of the fork servers: starts them, keeps them for later groups, and sends requests to them."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from drivetrain._base.interpreter import interpreter_options
from drivetrain._base.lazy import PUBLIC
from drivetrain._runtimes import ahead, forkserver
from drivetrain._runtimes.base import GroupSpec
from drivetrain._runtimes.processes import ForkedProcess
from drivetrain._worker.observer import OBSERVER
from drivetrain.errors import WaitTimeoutError

__all__ = ["ForkServers", "ServerHandle", "kept_servers", "wait_for"]

_INTERPRETER_VARIABLES = ("PYTHON", "LD_", "MALLOC_")
_EXIT_S = 10.0


def _public_modules() -> tuple[str, ...]:
    """Return the modules that train functions and plugins use through a module that re-exports their names."""
    return tuple(dict.fromkeys([*(module for module, _ in PUBLIC), *PUBLIC.values()]))


class ServerHandle:
    """The driver's side of a fork server process."""

    def __init__(self, key: object, process: subprocess.Popen[bytes] | ForkedProcess, control: socket.socket) -> None:
        self.key = key
        self.owner = os.getpid()
        self.started = time.time()
        self.requested: set[int] = set()  # the tokens of the workers that the server has not forked yet
        self.control = control
        self._process = process
        self._next_token = 0

    @classmethod
    def start(cls, key: object, preload: Sequence[str], environment: Mapping[str, str]) -> ServerHandle:
        """Start a server, which imports modules."""
        control, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from drivetrain._runtimes import forkserver; "
            f"forkserver.main({theirs.fileno()}, {_public_modules()!r}, {tuple(preload)!r}, {os.getpid()})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *interpreter_options(), "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,  # only the driver handles Ctrl-C in the terminal
            )
        return cls(key, process, control)

    def prepare(self, spec: GroupSpec, environment: Mapping[str, str]) -> bool:
        """Make a server that was forked from this process import modules. Return False if workers need another one.

        Args:
            spec: what the run needs.
            environment: the environment variables of the workers.

        Raises:
            WaitTimeoutError: the imports take longer than the run may take to start.
        """
        deadline = time.monotonic() + spec.start_timeout_s
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(spec.interrupts.fileno(), select.POLLIN)
        try:
            message = ("prepare", _public_modules(), tuple(spec.preload), dict(environment), tuple(sys.path))
            self._send(message, (), spec.start_timeout_s)
            while not wait_for(self.control, select.POLLIN, 0.0):
                if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise WaitTimeoutError(
                        "[DT-303] the workers did not start within RunConfig.start_timeout_s; still waiting for the "
                        f"imports of {', '.join(spec.preload)} in the process from which they are forked"
                    )
                spec.interrupts.act()
            return forkserver.receive(self.control) is not None
        except OSError:  # it has exited
            return False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not wait_for(self.control, select.POLLHUP, 0.0)

    def fork(self, request: forkserver.ForkRequest, descriptors: Sequence[int], *, timeout_s: float) -> int:
        """Request a new worker, and return the token that identifies the worker in messages.

        Raises:
            TimeoutError: the server did not receive the request in time.
            OSError: the server has exited.
        """
        self._next_token += 1
        self._send(("fork", self._next_token, request), descriptors, timeout_s)
        self.requested.add(self._next_token)
        return self._next_token

    def close(self, *, wait_s: float = 0.0) -> None:
        """Kill the server. The kernel then kills the server's remaining workers.

        Args:
            wait_s: seconds to wait before that. In this time, the server kills its workers and the processes that they
                have started, and exits. A server with pending requests is busy importing, and is killed at once.
        """
        self.control.close()
        try:
            if wait_s and not self.requested:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(wait_s)
        finally:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # this process may not kill it: see ForkedProcess
                self._process.wait(_EXIT_S)

    def _send(self, message: object, descriptors: Sequence[int], timeout_s: float) -> None:
        self.control.settimeout(max(0.001, timeout_s))
        try:
            forkserver.send(self.control, message, descriptors)
        finally:
            self.control.settimeout(None)


def wait_for(source: socket.socket | int, events: int, seconds: float) -> bool:
    """Wait until an event occurs on a descriptor. Return False after the timeout."""
    poller = select.poll()
    poller.register(source, events)
    return bool(poller.poll(1000 * max(0.0, seconds)))


def _latest_change(modules: Sequence[str]) -> float:
    """Return the Unix time in seconds at which a file of one of the modules last changed; 0 if no file is known.

    The path of a submodule is guessed, because looking it up would import its package into the driver.
    """
    latest = 0.0
    for name in modules:
        package, *path = name.split(".")
        with contextlib.suppress(ImportError, ValueError, OSError):
            spec = importlib.util.find_spec(package)
            if spec is not None and spec.has_location and spec.origin is not None:
                file = os.path.join(os.path.dirname(spec.origin), *path) + ".py" if path else spec.origin
                latest = max(latest, os.stat(file).st_mtime)
    return latest


class ForkServers:
    """Keeps idle fork servers, so that later groups of this process start within milliseconds.

    Args:
        limit: maximum number of idle servers to keep.
    """

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[ServerHandle] = []

    def acquire(self, spec: GroupSpec, environment: Mapping[str, str]) -> ServerHandle:
        """Return a running idle server that fits the spec, or a new server. Close idle servers that do not fit."""
        prefixes = (*_INTERPRETER_VARIABLES, *(spec.preload_environment if spec.preload else ()))
        variables = frozenset(
            (name, value)
            for name, value in environment.items()
            if name.startswith(prefixes) or name in spec.environment
        )
        key = (tuple(spec.preload), variables, tuple(sys.path))
        reused: ServerHandle | None = None
        with self._lock:
            idle = [server for server in self._idle if server.owner == os.getpid()]  # skips servers of a parent process
            changed = _latest_change(spec.preload)
            fitting = [server for server in idle if server.key == key and server.alive and server.started > changed]
            if fitting:
                reused = fitting.pop()
            self._idle = fitting
        for server in idle:
            if server is not reused and server not in fitting:
                server.close()
        return reused or _forked_early(key, spec, environment) or ServerHandle.start(key, spec.preload, environment)

    def release(self, server: ServerHandle) -> None:
        """Keep a server that its group no longer uses. If there are too many idle servers, close the oldest ones."""
        with self._lock:
            self._idle.append(server)
            dropped = self._idle[: -self._limit]
            self._idle = self._idle[-self._limit :]
        for old in dropped:
            old.close()

    def close(self) -> None:
        """Close the idle servers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for server in idle:
            if server.owner == os.getpid():
                server.close()


def _forked_early(key: object, spec: GroupSpec, environment: Mapping[str, str]) -> ServerHandle | None:
    """Return the server that was forked at the head of the script, unless one that is started now would differ."""
    early = ahead.take_server()
    if early is None:
        return None
    server = ServerHandle(key, early.process, early.control)
    server.started = early.started
    try:
        variables = _read_on_import(spec, {**os.environ, **spec.environment})
        is_same = variables == _read_on_import(spec, early.environment) and early.has_settings_of_driver()
        if is_same and server.prepare(spec, environment):
            return server
    except BaseException:
        server.close()
        raise
    server.close()
    return None


def _read_on_import(spec: GroupSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the interpreter or the imports of a run may have read."""
    prefixes = (*_INTERPRETER_VARIABLES, *spec.preload_environment)
    found = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    found |= {name: environment[name] for name in spec.environment if name in environment}
    return {name: value for name, value in found.items() if not name.startswith(OBSERVER)}


kept_servers = ForkServers()
atexit.register(kept_servers.close)
