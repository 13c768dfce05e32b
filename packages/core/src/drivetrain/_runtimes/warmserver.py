"""The warm server: a process that remains after a run, and from which the drivers of later runs are forked.

It is forked from the fork server of a run (:mod:`drivetrain._runtimes.ahead`) once that has imported what the head of
the script and the first step need, and has no thread and no accelerator. A driver that is forked from it continues
where the first driver was before its imports: it executes the script, and forks a fork server of its own.

The server ends when it was not used for the time that the user has set, when a file that it has imported changes, or
on request. It never has the modules of the user, whose changes would be missed. Its clients are in
:mod:`drivetrain._runtimes.warm`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from typing import Any, NoReturn

from drivetrain._base.lazy import PUBLIC
from drivetrain._base.peers import peer_uid
from drivetrain._plugins.frameworks import reseed
from drivetrain._plugins.loading import list_plugins, load_plugin
from drivetrain._runtimes.processes import die_with_parent, fork_process
from drivetrain._runtimes.warm import PASSED, abstract_name, receive_line, warm_servers

__all__ = ["BecomeDriver", "DriverRequest", "WarmSettings", "fork_warm_server"]

_WAIT_S = 5.0
_PAUSE_S = 0.1
_MAX_WAIT_S = 3600.0
_MAX_SERVERS = 3
_MAX_MEMORY_BYTES = 4 << 30
_CALLBACKS = ("progress", "csv", "json")
"""The callbacks that a run has by default."""

_SUFFIXES = all_suffixes()


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmSettings:
    """The settings of a warm server.

    Attributes:
        digest: the digest of the scripts and environments that it serves.
        modules: the modules at the head of the script.
        keep_s: the time in seconds for which it is kept.
        environment: the environment variables of its drivers.
    """

    digest: str
    modules: tuple[str, ...]
    keep_s: float
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverRequest:
    """The request of a client for a driver. The standard streams come with it.

    Attributes:
        path: the path of the script, as the user has given it.
        arguments: its arguments.
        working_directory: the working directory.
        umask: the permissions that new files do not get.
        variables: the environment variables that the shell changes from command to command.
        keep_s: the time in seconds for which the server is kept after the run; None for the time as before.
    """

    path: str
    arguments: list[str]
    working_directory: str
    umask: int
    variables: dict[str, str]
    keep_s: float | None


class BecomeDriver(BaseException):
    """Unwinds the stack of the warm server in a process that was forked from it to run a script.

    Args:
        request: the request of the client.
        signal_mask: the blocked signals of a driver. SIGINT is blocked until then.
    """

    def __init__(self, request: DriverRequest, signal_mask: set[signal.Signals | int]) -> None:
        self.request = request
        self.signal_mask = signal_mask


def fork_warm_server(settings: WarmSettings, control: socket.socket, driver: int) -> None:
    """Fork a warm server from this process. Without effect if there is one for the same scripts.

    Args:
        settings: its settings.
        control: the connection of this process to its driver, which the server closes.
        driver: the pidfd of that driver, which the server closes.

    Raises:
        BecomeDriver: in each process that the warm server has forked as a driver.
    """
    reaps_children = signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN
    if None in (sys.stdin, sys.stdout, sys.stderr) or not reaps_children or _resident_bytes() > _MAX_MEMORY_BYTES:
        return
    _stop_excess()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{abstract_name(settings.digest)}")
        listener.listen()
        pid = fork_process()
    except OSError:
        listener.close()
        return
    if pid != 0:
        listener.close()
        os.waitpid(pid, 0)
        return
    if fork_process() != 0:  # the server is no child of the driver, or of its fork server
        os._exit(0)
    control.close()
    os.close(driver)
    _Server(listener, settings).run()


def _stop_excess() -> None:
    """End the idle servers that would be used last, so that there are not too many with a new one."""
    servers = warm_servers()
    idle = sorted((server for server in servers if not server.runs), key=lambda server: server.remaining_s)
    for server in idle[: max(0, len(servers) + 1 - _MAX_SERVERS)]:
        server.stop()


@dataclass(frozen=True, slots=True)
class _Driver:
    pid: int
    pidfd: int
    client: socket.socket


class _Server:
    """A warm server.

    Args:
        listener: the socket to which the clients connect.
        settings: its settings.
    """

    def __init__(self, listener: socket.socket, settings: WarmSettings) -> None:
        self._listener = listener
        self._settings = settings
        self._keep_s = settings.keep_s
        self._ends = time.monotonic() + settings.keep_s
        self._signal_mask: set[signal.Signals | int] = set()
        self._drivers: list[_Driver] = []
        self._served = 0
        self._files: list[str] = []
        self._states: list[tuple[int, int] | None] = []

    def run(self) -> NoReturn:
        """Serve clients until the time is over, and exit. Raises :class:`BecomeDriver` in a driver."""
        try:
            self._signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.close(null)
            os.chdir("/")
            _import_for_drivers()
            if len(os.listdir("/proc/self/task")) != 1:  # a plugin has started a thread, which a fork would not have
                os._exit(0)
            self._files = _imported_files()
            self._states = _states(self._files)
            gc.freeze()
            while self._drivers or time.monotonic() < self._ends:
                self._handle()
        except BecomeDriver:
            raise
        except BaseException:
            os._exit(1)
        os._exit(0)

    def _handle(self) -> None:
        wait_s = min(_MAX_WAIT_S, max(0.0, self._ends - time.monotonic())) if not self._drivers else None
        watched: list[Any] = [self._listener] if self._listener.fileno() >= 0 else []
        watched += [source for driver in self._drivers for source in (driver.pidfd, driver.client)]
        ready = select.select(watched, [], [], wait_s)[0]
        for driver in list(self._drivers):
            if driver.pidfd in ready:
                self._on_exit(driver)
            elif driver.client in ready:  # a client sends nothing after its request: it has died
                _kill(driver)
        if self._listener in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or there are too many descriptors
            time.sleep(_PAUSE_S)
            return
        connection.settimeout(_WAIT_S)
        is_kept = False
        with contextlib.suppress(Exception):  # of a client that dies now, or that is none
            is_kept = peer_uid(connection) == os.getuid() and self._answer(connection)
        if not is_kept:
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Reply to a client. Return True if the connection belongs to a driver from now on."""
        line, descriptors = receive_line(connection)
        try:
            request = json.loads(line)
            command = request.pop("command")
            if command == "run":
                return self._run(DriverRequest(**request), descriptors, connection)
            if command == "stop":
                self._stop()
            connection.sendall(json.dumps(self._status()).encode() + b"\n")
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _run(self, request: DriverRequest, descriptors: Sequence[int], client: socket.socket) -> bool:
        """Fork a driver. Return False if the client has to make the imports itself."""
        if self._states != _states(self._files):
            self._stop()
            return False
        if _hides_imported(os.path.join(request.working_directory, request.path)) or _has_data(client):
            return False
        server = os.getpid()
        pid = fork_process()
        if pid == 0:
            self._become_driver(server, request, descriptors, client)
        try:
            driver = _Driver(pid, os.pidfd_open(pid), client)
            client.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        self._drivers.append(driver)
        self._served += 1
        if request.keep_s is not None:
            self._keep_s = float(request.keep_s)
        return True

    def _become_driver(
        self, server: int, request: DriverRequest, descriptors: Sequence[int], client: socket.socket
    ) -> NoReturn:
        os.setsid()
        die_with_parent(server)
        for connection in (self._listener, client, *(each.client for each in self._drivers)):
            connection.close()
        for driver in self._drivers:
            os.close(driver.pidfd)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update({name: text for name, text in self._settings.environment.items() if name not in PASSED})
        os.environ.update(request.variables)
        os.umask(request.umask)
        os.chdir(request.working_directory)
        gc.enable()
        reseed()
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
        raise BecomeDriver(request, self._signal_mask)

    def _on_exit(self, driver: _Driver) -> None:
        _, status = os.waitpid(driver.pid, 0)
        with contextlib.suppress(OSError):  # the client has died, too
            driver.client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        driver.client.close()
        os.close(driver.pidfd)
        self._drivers.remove(driver)
        self._ends = time.monotonic() + self._keep_s

    def _stop(self) -> None:
        """Accept no other client, and exit after the last run. The name is free for another server."""
        self._listener.close()
        self._keep_s = self._ends = 0.0

    def _status(self) -> Mapping[str, Any]:
        remaining_s = self._keep_s if self._drivers else max(0.0, self._ends - time.monotonic())
        return {
            "pid": os.getpid(),
            "modules": self._settings.modules,
            "runs": len(self._drivers),
            "served": self._served,
            "remaining_s": remaining_s,
            "memory_bytes": _resident_bytes(),
        }


def _import_for_drivers() -> None:
    """Import what every driver imports later: for ``fit()``, and to find out which runtime starts the workers."""
    for name in (*dict.fromkeys(module for module, _ in PUBLIC), "drivetrain._driver.fitting"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    plugins = [("runtime", plugin.name) for plugin in list_plugins("runtime")]
    for kind, name in (*plugins, *(("callback", name) for name in _CALLBACKS)):
        with contextlib.suppress(Exception):
            load_plugin(kind, name)


def _kill(driver: _Driver) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(driver.pid, signal.SIGKILL)


def _has_data(connection: socket.socket) -> bool:
    """Return True if the other end has sent something, or has closed the connection."""
    return bool(select.select([connection], [], [], 0.0)[0])


def _hides_imported(script: str) -> bool:
    """Return True if the directory of a script has a module with the name of one that this process has imported."""
    roots = {name.partition(".")[0] for name in sys.modules}
    with os.scandir(os.path.dirname(os.path.realpath(script))) as entries:
        for entry in entries:
            name, dot, suffix = entry.name.partition(".")
            is_module = dot + suffix in _SUFFIXES or os.path.exists(os.path.join(entry.path, "__init__.py"))
            if name in roots and is_module:
                return True
    return False


def _imported_files() -> list[str]:
    """Return the imported files, and the directories that modules come from."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return list(dict.fromkeys([*sys.path[1:], *(file for file in files if isinstance(file, str))]))


def _states(paths: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return the time of change and the size of files and directories; None for each one that does not exist."""
    found: list[tuple[int, int] | None] = []
    for path in paths:  # thousands, while a client waits
        try:
            status = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return found


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
