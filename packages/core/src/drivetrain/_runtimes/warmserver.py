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
import fcntl
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import all_suffixes
from typing import Any, NoReturn

from drivetrain._base.inherited import inherited_settings
from drivetrain._base.interpreter import is_in_site
from drivetrain._base.lazy import PUBLIC
from drivetrain._base.peers import peer_pid, peer_uid
from drivetrain._plugins.frameworks import reseed
from drivetrain._plugins.loading import list_plugins, load_plugin
from drivetrain._runtimes.processes import die_with_parent, fork_process, kill_group, uses_accelerator
from drivetrain._runtimes.warm import ACCEPTED, INHERITED, PASSED, abstract_name, digest_of, receive_line, warm_servers

__all__ = ["BecomeDriver", "DriverRequest", "WarmSettings", "fork_warm_server"]

_WAIT_S = 2.0
_MAX_WAIT_S = 3600.0
_MAX_SERVERS = 5
_MAX_MEMORY_BYTES = 4 << 30
_CALLBACKS = ("progress", "csv", "json")
"""The callbacks that a run has by default."""

_SUFFIXES = all_suffixes()
_STANDARD = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmSettings:
    """The settings of a warm server.

    Attributes:
        facts: what it requires of its clients: see :func:`~drivetrain._runtimes.warm.warm_facts`.
        keep_s: the time in seconds for which it is kept.
        started: the time before the first import, as Unix time in seconds.
        modules: the modules at the head of the script.
        environment: the environment variables of its drivers.
    """

    facts: Mapping[str, object]
    keep_s: float
    started: float
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


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
        descriptors: the numbers of the open files that come with the request, the standard streams included.
        original_arguments: the command line of the client.
    """

    path: str
    arguments: list[str]
    working_directory: str
    umask: int
    variables: dict[str, str]
    keep_s: float | None
    descriptors: list[int]
    original_arguments: list[str]


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
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{abstract_name(digest_of(settings.facts))}")
        _stop_excess()
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
    """End the idle servers that would end first, so that there are not too many with a new one."""
    servers = warm_servers()
    idle = sorted((server for server in servers if not server.runs), key=lambda server: server.remaining_s)
    for server in idle[: max(0, len(servers) + 1 - _MAX_SERVERS)]:
        server.stop()


@dataclass(slots=True)
class _Driver:
    pid: int
    pidfd: int
    client: socket.socket
    has_client: bool = True


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
        self._watched: list[str] = []
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
            _import_for_drivers()
            if self._can_serve():
                os.chdir("/")
                gc.freeze()
                while self._drivers or time.monotonic() < self._ends:
                    self._handle()
        except BecomeDriver:
            raise
        except BaseException:
            os._exit(1)
        os._exit(0)

    def _can_serve(self) -> bool:
        """Return True if no import prevents it, and remember the state of the imported files."""
        files = _imported_files()
        directories = [path for path in sys.path[1:] if _is_installed(path)]
        self._watched = [*files, *directories]
        self._states = _states(self._watched)
        started_ns = int(self._settings.started * 1e9)
        has_changed = any(state is not None and state[0] >= started_ns for state in self._states[: len(files)])
        has_own = any(file.startswith(f"{sys.path[0]}{os.sep}") and not _is_installed(file) for file in files)
        has_threads = len(os.listdir("/proc/self/task")) != 1
        return not (has_changed or has_own or has_threads or uses_accelerator())

    def _handle(self) -> None:
        poller = select.poll()
        if self._listener.fileno() >= 0:
            poller.register(self._listener, select.POLLIN)
        for driver in self._drivers:
            poller.register(driver.pidfd, select.POLLIN)
            if driver.has_client:
                poller.register(driver.client, select.POLLIN)
        wait_s = max(0.0, self._ends - time.monotonic())
        ready = dict(poller.poll(None if self._drivers else 1000 * min(_MAX_WAIT_S, wait_s)))
        for driver in list(self._drivers):
            if driver.pidfd in ready:
                self._on_exit(driver)
            elif driver.client.fileno() in ready:  # a client sends nothing after its request: it has died
                driver.has_client = False
                kill_group(driver.pid, signal.SIGKILL)
        if self._listener.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # there are too many descriptors: it ends after its runs
            self._stop()
            return
        connection.settimeout(_WAIT_S)
        is_kept = False
        with contextlib.suppress(Exception):  # of a client that dies now, or that is none
            is_kept = peer_uid(connection) == os.getuid() and self._answer(connection)
        if not is_kept:
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Reply to a client. Return True if the connection belongs to a driver from now on."""
        request = json.loads(receive_line(connection)[0])
        command = request.pop("command")
        if command == "run":
            return self._run(DriverRequest(**request), connection)
        if command == "stop":
            self._stop()
        connection.sendall(json.dumps(self._status()).encode() + b"\n")
        return False

    def _run(self, request: DriverRequest, client: socket.socket) -> bool:
        """Fork a driver. Return False if the client has to make the imports itself."""
        peer = peer_pid(client)
        if not peer or inherited_settings(peer) != self._settings.facts[INHERITED]:
            return False
        if self._states != _states(self._watched):
            self._stop()
            return False
        if any(map(_hides_imported, [path for path in sys.path if not _is_installed(path)])):
            return False
        client.sendall(ACCEPTED + b"\n")
        _, descriptors = receive_line(client)
        if not descriptors:  # the client has died
            return False
        try:
            self._fork(request, descriptors, client)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, request: DriverRequest, descriptors: list[int], client: socket.socket) -> None:
        server = os.getpid()
        spare = os.dup(client.fileno())  # so that there is a free descriptor for the one of the process
        pid = fork_process()
        if pid == 0:
            os.close(spare)
            self._become_driver(server, request, descriptors, client)
        os.close(spare)
        pidfd = os.pidfd_open(pid)
        self._drivers.append(_Driver(pid, pidfd, client))
        self._served += 1
        if request.keep_s is not None:
            self._keep_s = float(request.keep_s)

    def _become_driver(
        self, server: int, request: DriverRequest, descriptors: list[int], client: socket.socket
    ) -> NoReturn:
        """Prepare this process, and raise :class:`BecomeDriver` when the client has allowed the start.

        A process that cannot be prepared exits without a message. The client then makes the imports itself.
        """
        try:
            os.setsid()
            die_with_parent(server)
            for connection in (self._listener, *(each.client for each in self._drivers)):
                connection.close()
            for driver in self._drivers:
                os.close(driver.pidfd)
            reply, start = _place(descriptors, client, request.descriptors)
            _open_streams()
            os.environ.clear()
            os.environ.update({name: text for name, text in self._settings.environment.items() if name not in PASSED})
            os.environ.update(request.variables)
            os.umask(request.umask)
            os.chdir(request.working_directory)
            gc.enable()
            reseed()
            os.write(reply, json.dumps({"pid": os.getpid()}).encode() + b"\n")
            os.close(reply)
            may_start = os.read(start, 1)
            os.close(start)
        except BaseException:
            os._exit(1)
        if not may_start:  # the client has died, or does not wait any longer
            os._exit(1)
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
            "facts": self._settings.facts,
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


def _place(descriptors: list[int], client: socket.socket, numbers: Sequence[int]) -> tuple[int, int]:
    """Give the descriptors of a client the numbers that they have there.

    Args:
        descriptors: the descriptor that allows the start, and those of the client. The list is emptied.
        client: the connection to the client.
        numbers: the numbers.

    Returns:
        The new descriptors of the connection, and of the permission to start.

    Raises:
        OSError: this process has a file of its own at one of the numbers.
    """
    free = max(numbers) + 1
    reply, start, *moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in (client.fileno(), *descriptors)]
    client.close()
    while descriptors:
        os.close(descriptors.pop())
    if any(number > 2 and os.path.exists(f"/proc/self/fd/{number}") for number in numbers):
        raise OSError("a module has opened a file with this number")
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return reply, start


def _open_streams() -> None:
    """Make the standard streams fit the new files behind their descriptors."""
    raw = io.FileIO(0, closefd=False)
    raw.name = "<stdin>"
    old: Any = sys.stdin
    new: Any = io.TextIOWrapper(
        io.BufferedReader(raw), old.encoding, old.errors, "\n", raw.isatty(), write_through=old.write_through
    )
    new.mode = "r"
    sys.stdin = sys.__stdin__ = new  # type: ignore[misc]
    if isinstance(sys.stdout, io.TextIOWrapper):  # otherwise, an import has replaced it
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())


def _is_installed(path: str) -> bool:
    """Return True for a file or directory of the standard library or of installed packages."""
    return path.startswith(_STANDARD) or is_in_site(path)


def _hides_imported(directory: str) -> bool:
    """Return True if a directory has a module with the name of one that this process has imported from elsewhere."""
    roots = {name.partition(".")[0]: module for name, module in sys.modules.items() if "." not in name}
    try:
        entries = os.listdir(directory)
    except OSError:
        return False
    for entry in entries:
        name, dot, suffix = entry.partition(".")
        is_known = name in roots and not str(getattr(roots[name], "__file__", None)).startswith(f"{directory}{os.sep}")
        if is_known and (dot + suffix in _SUFFIXES or os.path.exists(os.path.join(directory, entry, "__init__.py"))):
            return True
    return False


def _imported_files() -> list[str]:
    """Return the files of all imported modules. Some modules have a relative path, which names no file."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return list(dict.fromkeys(file for file in files if isinstance(file, str) and os.path.isabs(file)))


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
