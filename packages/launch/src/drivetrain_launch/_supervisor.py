"""The parent of a worker process, which the command starts on the worker's node.

A supervisor exists because the driver is not the parent of the workers, and a launcher reports their ends late or not
at all. It does what the local runtime's fork server does on the driver's machine:

- It forks the worker, again for each attempt of the run, so that a retry needs no new command and no place in a queue.
- It waits for the worker, and reports the exit code to the driver.
- It kills all processes that the worker has left, also those whose parent has exited: they become its children.
- It kills the worker when the connection to the driver closes, and the kernel kills the worker if the supervisor dies.

The supervisor has one thread, and imports no framework.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from drivetrain import ConfigurationError, FailureKind
from drivetrain.plugin.backends import visible_gpus
from drivetrain.plugin.processes import (
    Channel,
    OomCounter,
    ProcessParent,
    Refuse,
    explain_exit,
    flush_output,
    kill_group,
    reseed,
)
from drivetrain.plugin.runtimes import NO_RESPONSE, DriverAddress, connect_to_driver, read_stacks, worker_main
from drivetrain_launch._shares import VisibleDevices
from drivetrain_launch._token import read_token

__all__ = [
    "ANY_INDEX",
    "SendStacks",
    "StartWorker",
    "StopWorker",
    "Terminating",
    "WorkerExited",
    "detect_lost_peer",
    "main",
]

ANY_INDEX = -1
"""The index of a supervisor whose command starts all workers: the driver gives such a supervisor its index."""

_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""After 20 s without data, the kernel checks every 5 s, up to 4 times, whether the peer's machine still responds."""

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A request of the driver: fork a worker, which connects to the driver.

    Attributes:
        index: the index of the worker.
        environment: environment variables to set.
        defaults: environment variables to set unless the command has set them.
        working_directory: the working directory, if it exists on this node.
        module_path: the entries of ``sys.path`` that precede all others.
        preload: see :class:`~drivetrain.plugin.Backend`.
    """

    index: int
    environment: Mapping[str, str]
    defaults: Mapping[str, str]
    working_directory: str
    module_path: Sequence[str]
    preload: Sequence[str]


@dataclass(frozen=True, slots=True)
class StopWorker:
    """A request of the driver: kill the worker."""


@dataclass(frozen=True, slots=True)
class SendStacks:
    """A request of the driver: send the stacks of the worker over a new connection, as the details of its introduction.

    Attributes:
        port: the port of the driver for the connection. The token is that of the supervisor.
        index: the index for the introduction.
        pid: the process id of the worker.
        descriptor: the descriptor in the worker from which the stacks can be read.
    """

    port: int
    index: int
    pid: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """An event: the worker has exited, and nothing that it has started is running.

    Attributes:
        exit_code: its exit code; the negative number of a signal.
        reason: why it was killed, if that is known.
        kind: the category of the failure.
    """

    exit_code: int
    reason: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class Terminating:
    """An event: the supervisor received SIGTERM, so the launcher or the batch system will kill it soon."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a supervisor until the driver closes the connection, and exit.

    Args:
        arguments: the driver's IP address and port, the index of the worker or :data:`ANY_INDEX`, and optionally the
            path of the file that contains the token, with escapes as in a URL, so that no shell changes it.
    """
    host, port, index, *files = arguments
    files = [os.fsdecode(unquote_to_bytes(file)) for file in files]
    status = 1
    try:
        address = DriverAddress(host, int(port), read_token(files[0] if files else None))
        visible = VisibleDevices(socket.gethostname(), tuple(visible_gpus()), tuple(sorted(os.sched_getaffinity(0))))
        connection = connect_to_driver(address, int(index), node_id=None, ip=None, details=visible, stacks=-1)
        with connection:
            detect_lost_peer(connection)
            _Supervisor(address, connection).run()
        status = 0
    except (ConfigurationError, ConnectionError) as error:
        print(f"drivetrain: {error}", file=sys.stderr)
    flush_output()
    os._exit(status)


def detect_lost_peer(connection: socket.socket) -> None:
    """Make reads from a connection fail if the peer's machine is lost, because such a machine closes no connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Supervisor:
    """One supervisor process.

    Args:
        address: the address of the driver, for the workers.
        connection: the connection to the driver.
    """

    def __init__(self, address: DriverAddress, connection: socket.socket) -> None:
        self._address = address
        self._connection = connection
        self._channel = Channel(connection)
        self._parent = ProcessParent(self._on_exit, _SIGNALS)
        self._oom_kills = OomCounter()

    def run(self) -> None:
        """Perform the driver's requests until the connection closes. Then kill all children.

        Raises:
            ConfigurationError: the driver refuses this supervisor.
        """
        self._parent.begin()
        try:
            while True:
                ready, _, _ = select.select([self._channel.fileno(), self._parent.fileno()], [], [])
                if self._parent.fileno() in ready and signal.SIGTERM in self._parent.handle():
                    self._pass_on_termination()
                if self._channel.fileno() in ready and not self._perform_next():
                    return
        finally:
            self._parent.close()

    def _perform_next(self) -> bool:
        """Perform the next request of the driver. Return False if the connection was closed."""
        try:
            request = self._channel.receive()
        except OSError:  # the machine of the driver was lost
            return False
        match request:
            case None:
                return False
            case Refuse():
                raise ConfigurationError(request.reason)
            case StartWorker():
                self._parent.fork_worker(partial(self._work, request))
            case StopWorker():
                for pid in self._parent.workers:
                    kill_group(pid, signal.SIGKILL)
            case SendStacks():
                stacks = read_stacks({0: (request.pid, request.descriptor)}).get(0, NO_RESPONSE)
                with contextlib.suppress(OSError):  # the driver did not wait for it
                    connect_to_driver(
                        replace(self._address, port=request.port),
                        request.index,
                        node_id=None,
                        ip=None,
                        details=stacks,
                        stacks=-1,
                    ).close()
        return True

    def _work(self, request: StartWorker) -> None:
        """Run as a worker. The launcher forwards its output to the driver."""
        self._connection.close()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.environ.update(request.environment)
        for name, value in request.defaults.items():
            os.environ.setdefault(name, value)
        with contextlib.suppress(OSError):  # this node may not have the directory
            os.chdir(request.working_directory)
        sys.path[:] = dict.fromkeys([*request.module_path, *sys.path])
        reseed()
        worker_main(self._address, request.index, preload=request.preload)

    def _pass_on_termination(self) -> None:
        self._send(Terminating())
        for pid in self._parent.workers:  # not every launcher signals the descendants of its processes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _on_exit(self, pid: int, exit_code: int) -> None:
        self._send(WorkerExited(exit_code, *explain_exit(exit_code, self._oom_kills)))

    def _send(self, event: WorkerExited | Terminating) -> None:
        with contextlib.suppress(OSError):  # the driver has exited; the loop will notice that
            self._channel.send(event)
