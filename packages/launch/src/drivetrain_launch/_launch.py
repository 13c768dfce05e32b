"""The commands and supervisors of a run, which all its worker groups use one after another."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING
from urllib.parse import quote

from drivetrain import ConfigurationError
from drivetrain.plugin.processes import Inbox, close_in_forked_children, send_message
from drivetrain.plugin.runtimes import DriverAddress, Introduction, WorkerListener
from drivetrain_launch._commands import Commands
from drivetrain_launch._shares import VisibleDevices
from drivetrain_launch._supervisor import (
    ANY_INDEX,
    SendStacks,
    StartWorker,
    StopWorker,
    Terminating,
    WorkerExited,
    detect_lost_peer,
)
from drivetrain_launch._template import Template
from drivetrain_launch._token import TOKEN_VARIABLE, TokenFile

if TYPE_CHECKING:
    from drivetrain.plugin.callbacks import Console

__all__ = ["Launch", "LaunchSpec", "Supervisor"]

_STOP_WAIT_S = 10.0
_EXIT_WAIT_S = 5.0
"""Seconds that a command has to exit after its supervisors."""
_TERMINATE_WAIT_S = 5.0
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """The commands and workers that a launch starts.

    Attributes:
        template: the template of the command line.
        hosts: the hosts on which workers are started in turn; empty if the template has no ``{host}``.
        num_workers: the number of workers.
        address: the IP address of this machine on which to wait for connections.
        ports: see :class:`~drivetrain.plugin.runtimes.GroupSpec`.
        token_directory: the directory of the file with the token; None to pass the token in the environment.
    """

    template: Template
    hosts: tuple[str, ...]
    num_workers: int
    address: str
    ports: range | None
    token_directory: Path | None


class Supervisor:
    """The driver's connection to a supervisor.

    Args:
        introduction: the first message of the supervisor.

    Attributes:
        visible: the devices that the worker can use.
        exited: how the latest worker has exited; None if it is running, or was not started.
        is_running: True from the request to start a worker until its exit.
        is_lost: True if the connection was closed.
        is_terminating: True if the supervisor received SIGTERM.
    """

    def __init__(self, introduction: Introduction) -> None:
        self.visible: VisibleDevices = introduction.details
        self.exited: WorkerExited | None = None
        self.is_running = self.is_lost = self.is_terminating = False
        detect_lost_peer(introduction.connection)
        close_in_forked_children(introduction.connection)
        self._inbox = Inbox(introduction.connection)

    @property
    def connection(self) -> socket.socket:
        """The driver's end of the connection."""
        return self._inbox.socket

    def read(self) -> None:
        """Handle the available events of the supervisor."""
        for event in self._inbox.read():
            match event:
                case WorkerExited():
                    self.exited, self.is_running = event, False
                case Terminating():
                    self.is_terminating = True
        if self._inbox.closed:
            self.is_lost, self.is_running = True, False

    def send(self, request: StartWorker | StopWorker | SendStacks) -> None:
        """Send a request without waiting for a response. Any thread may call this method."""
        if isinstance(request, StartWorker):
            self.exited, self.is_running = None, True
        with contextlib.suppress(OSError):  # the loss of the connection is noticed when it is read
            send_message(self.connection, request)


class Launch:
    """Starts the commands, and waits for the supervisors and workers to connect.

    Args:
        spec: the commands and workers to start.
        console: shows the output of the commands.

    Attributes:
        spec: the commands and workers that were started.
        supervisors: the connected supervisors, by the index of the worker.
        workers: the introductions of the workers, by index; the latest one of each index.
        nodes: the nodes of the previous group, in the order of their ranks.
        is_starting_workers: True from the request to start workers until all of them have connected. If this takes too
            long, a worker may connect when it is no longer expected.
        lost: the indices of the supervisors whose connection was closed.

    Raises:
        ConfigurationError: the address, or the file with the token, cannot be used.
    """

    def __init__(self, spec: LaunchSpec, console: Console) -> None:
        self.spec = spec
        self.supervisors: dict[int, Supervisor] = {}
        self.workers: dict[int, Introduction] = {}
        self.nodes: Sequence[str] = ()
        self.is_starting_workers = False
        self.lost: set[int] = set()
        self._console = console
        self._closing = contextlib.ExitStack()
        self._selector = self._closing.enter_context(selectors.DefaultSelector())
        try:
            self._listener = _listen(spec)
            self._closing.callback(self._listener.close)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._token_file: TokenFile | None = None
            if spec.token_directory is not None:
                self._token_file = TokenFile(spec.token_directory, self._listener.address.token)
                self._closing.callback(self._token_file.delete)
            files = [str(self._token_file.path)] if self._token_file is not None else []
            self._commands = Commands(self._selector, console, files)
            self._closing.callback(self._end)
            for index in [ANY_INDEX] if spec.template.starts_all_workers else range(spec.num_workers):
                self._start(index)
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """True if another group can use the supervisors: all are connected, idle, and not about to be terminated."""
        if self.lost or self.is_starting_workers or len(self.supervisors) < self.spec.num_workers:
            return False
        return not any(each.is_running or each.is_terminating for each in self.supervisors.values())

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`handle` has something to do."""
        return self._selector.fileno()

    def handle(self, timeout_s: float | None = 0.0) -> None:
        """Wait until something happens, and handle it: connections, events of supervisors, output, and exits."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def find_failure(self) -> str | None:
        """Return why not all workers can be started, or None: a command has exited early, or a supervisor is lost."""
        ended = {self._command_of(index) for index in self.lost}
        if self.spec.template.starts_all_workers:
            ended |= self._commands.exited if len(self.supervisors) < self.spec.num_workers else set()
        else:
            ended |= self._commands.exited - self.supervisors.keys()
        if not ended:
            return None
        self.handle()  # the last output
        return self._commands.describe(min(ended))

    def describe(self, index: int | None = None) -> str:
        """Return the state and the last output of the command for a worker, or of the first one that is not ready."""
        if index is None:
            index = next((number for number in range(self.spec.num_workers) if number not in self.supervisors), 0)
        return self._commands.describe(self._command_of(index))

    def has_command_exited(self, index: int) -> bool:
        """Return True if the command that started a worker has exited."""
        return self._command_of(index) in self._commands.exited

    def note_connected(self) -> None:
        """Delete the file with the token, because all supervisors have read it. They pass the token to the workers."""
        if self._token_file is not None:
            self._token_file.delete()

    def stop_workers(self) -> None:
        """Kill the workers, and wait until they have exited, for a limited time."""
        for supervisor in self.supervisors.values():
            if supervisor.is_running:
                supervisor.send(StopWorker())
        deadline = time.monotonic() + _STOP_WAIT_S
        while any(each.is_running for each in self.supervisors.values()) and time.monotonic() < deadline:
            self.handle(deadline - time.monotonic())

    def close(self) -> None:
        """End the workers, the supervisors and the commands, and release everything else. May be called repeatedly."""
        self._closing.close()

    def _start(self, index: int) -> None:
        spec, address = self.spec, self._listener.address
        worker = [sys.executable, "-m", "drivetrain_launch", address.host, str(address.port), str(index)]
        environment = dict(os.environ)
        if self._token_file is not None:
            worker.append(quote(os.fsencode(self._token_file.path)))  # no shell changes it
        else:
            environment[TOKEN_VARIABLE] = address.token.hex()
        host = spec.hosts[index % len(spec.hosts)] if spec.hosts else ""
        command = spec.template.fill(num_workers=spec.num_workers, worker=worker, host=host)
        name = f"`{spec.template.text}`" + (f" for host {host}" if host else "")
        self._commands.start(command, name, environment)

    def _command_of(self, index: int) -> int:
        """Return the number of the command that starts a worker."""
        return 0 if self.spec.template.starts_all_workers else index

    def _accept(self) -> None:
        introduction = self._listener.accept()
        if introduction is None:
            return
        if not isinstance(introduction.details, VisibleDevices):
            self.workers[introduction.index] = introduction
            return
        index = len(self.supervisors) if introduction.index == ANY_INDEX else introduction.index
        if index not in range(self.spec.num_workers) or index in self.supervisors:
            introduction.connection.close()
            self._console.print(
                f"`{self.spec.template.text}` has started more than {self.spec.num_workers} workers; a process on "
                f"{introduction.facts['hostname']} is not used. Add {{n}} to the command if it starts all workers",
                error=True,
            )
            return
        supervisor = self.supervisors[index] = Supervisor(introduction)
        self._selector.register(supervisor.connection, selectors.EVENT_READ, lambda: self._read(index))

    def _read(self, index: int) -> None:
        supervisor = self.supervisors[index]
        supervisor.read()
        if supervisor.is_lost:
            self.lost.add(index)
            self._selector.unregister(supervisor.connection)

    def _end(self) -> None:
        """End the supervisors, which kill their workers, and then the commands, which usually exit by themselves."""
        self._selector.unregister(self._listener)
        for supervisor in self.supervisors.values():
            with contextlib.suppress(OSError):
                supervisor.connection.shutdown(socket.SHUT_WR)
        try:
            if len(self.supervisors) == self.spec.num_workers:
                self._await_exits(_EXIT_WAIT_S)
            if self._is_running:
                self._commands.signal(SIGTERM)
                self._await_exits(_TERMINATE_WAIT_S)
            self._commands.signal(SIGKILL)
            self._await_exits(_KILL_WAIT_S)
        finally:
            for supervisor in self.supervisors.values():
                supervisor.connection.close()
            for worker in self.workers.values():
                worker.connection.close()
            self.supervisors.clear()
            self._commands.close()

    @property
    def address(self) -> DriverAddress:
        """The address to which the supervisors and workers connect."""
        return self._listener.address

    @property
    def _is_running(self) -> bool:
        return self._commands.are_running or len(self.lost) < len(self.supervisors)

    def _await_exits(self, seconds: float) -> None:
        """Wait until all supervisors and commands have exited, for a limited time."""
        deadline = time.monotonic() + seconds
        while self._is_running and (remaining := deadline - time.monotonic()) > 0:
            self.handle(remaining)


def _listen(spec: LaunchSpec) -> WorkerListener:
    try:
        return WorkerListener(spec.address, expected=2 * spec.num_workers, ports=spec.ports)
    except OSError as error:
        raise ConfigurationError(
            f"[DT-113] CommandRuntime: host: expected an IP address of this machine, got {spec.address!r} ({error})"
        ) from error
