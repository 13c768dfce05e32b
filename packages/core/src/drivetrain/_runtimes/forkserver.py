"""The fork server: the process from which local workers are forked.

The server imports the framework once, before any worker exists, and keeps running: N workers need one import, and a
retry or the next ``fit()`` of the same driver needs none. The server forks only while it has one thread, uses no
accelerator, and reaps its children as soon as they exit. When the driver exits, even by ``kill -9``, the server kills
all workers and all processes that they started. If the server itself dies, the kernel kills its children.

A process that a worker has started may have left the worker's process group, and its parent may have exited. The
server is the subreaper of its descendants, so the kernel makes such a process a child of the server. Once no worker is
left, the server kills these children.

The server communicates with the driver over a stream socket. The driver sends ``("fork", token, ForkRequest)`` with the
worker's file descriptors. The server sends ``("forked", token, pid)`` and ``("exited", token, exit code)``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from drivetrain._base.interpreter import interpreter_options
from drivetrain._hooks.helpers import worker_threads
from drivetrain._plugins.frameworks import limit_threads, load_frameworks, reseed
from drivetrain._runtimes.parent import ProcessParent
from drivetrain._runtimes.processes import fork_process
from drivetrain._runtimes.warmserver import BecomeDriver, WarmSettings, fork_warm_server
from drivetrain._wire.frames import Channel
from drivetrain._worker.leaving import ExitHandlers, finish_process
from drivetrain._worker.main import serve
from drivetrain._worker.stacks import dump_stacks_on_signal

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

__all__ = ["ForkRequest", "forks_cleanly", "main", "receive", "send", "serve_driver"]

_HEADER = struct.Struct(">I")
_MAX_DESCRIPTORS = 8
_WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Without this variable, importing pyarrow, directly or through pandas, would start a thread of its allocator. It is
not passed to the workers, which get the driver's environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkRequest:
    """The initial state of a worker process. Three descriptors are sent with it: connection, output and stacks."""

    environment: Mapping[str, str]
    working_directory: str
    module_path: Sequence[str]


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message together with file descriptors, up to the socket's timeout."""
    body = pickle.dumps(message)
    data = _HEADER.pack(len(body)) + body
    sent = socket.send_fds(connection, [data], descriptors)
    connection.sendall(data[sent:])


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for the next message and its file descriptors. Return None if the other end closed the connection."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, _MAX_DESCRIPTORS)
        data = bytearray(head)
        while len(data) < _HEADER.size or len(data) < _HEADER.size + _HEADER.unpack_from(data)[0]:
            expected = _HEADER.size if len(data) < _HEADER.size else _HEADER.size + _HEADER.unpack_from(data)[0]
            part = connection.recv(expected - len(data))
            if not part:
                return None
            data += part
    except ConnectionError:
        return None
    return pickle.loads(data[_HEADER.size :]), descriptors


def main(control_descriptor: int, own: Sequence[str], preload: Sequence[str], driver_pid: int) -> None:
    """Serve the driver until it closes the connection or exits. Then kill all children and exit.

    Args:
        control_descriptor: the connection to the driver.
        own: the modules of drivetrain that every worker needs.
        preload: the modules that the run names: those of the framework, for example.
        driver_pid: the pid of the driver.
    """
    # During the imports, garbage collection takes a tenth of the time. Later, it would write to memory pages that the
    # workers share.
    gc.disable()
    server = _Server(socket.socket(fileno=control_descriptor), os.pidfd_open(driver_pid))
    for name, value in _WITHOUT_THREADS.items():
        os.environ.setdefault(name, value)
    _import_all(own)
    pkgutil.resolve_name("pkgutil:resolve_name")  # compiles a pattern; otherwise every worker would compile it
    culprit = _import_cleanly(preload)
    if culprit is not None:
        # This module started threads. After a fork, they do not exist in the child, but locks that they held are still
        # held. Therefore restart without the module.
        os.set_inheritable(control_descriptor, True)
        other_modules = tuple(name for name in preload if name != culprit)
        code = f"import sys; sys.path[:] = {sys.path!r}; from drivetrain._runtimes import forkserver as f; " + (
            f"f.main({control_descriptor}, {tuple(own)!r}, {other_modules!r}, {driver_pid})"
        )
        os.execv(sys.executable, [sys.executable, *interpreter_options(), "-c", code])
    if preload:
        load_frameworks()
    server.run()


def serve_driver(
    control: socket.socket,
    driver: int,
    signal_mask: set[signal.Signals | int],
    frameworks: Sequence[str],
    warm: WarmSettings | None,
) -> NoReturn:
    """Serve the driver from which this process has just been forked, like :func:`main`.

    Args:
        control: the connection to the driver.
        driver: a pidfd of the driver.
        signal_mask: the blocked signals of the driver; this process has others.
        frameworks: the modules of frameworks to import. The driver imports them later, or at the same time.
        warm: the settings of the warm server to fork after the imports; None for none.

    Raises:
        BecomeDriver: in a process that was forked from the warm server, to run a script.
    """
    try:
        gc.disable()
        os.setsid()  # only the driver handles Ctrl-C in the terminal
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # a handler of a module
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        _close_inherited(output=warm is not None)
        sys.modules["__main__"] = ModuleType("__main__")  # instead of the script, which is at its head
        os.environ.update(_WITHOUT_THREADS)
        if _import_cleanly(load_frameworks()) is None:
            if warm is not None:
                fork_warm_server(warm, control, driver)
            if _import_cleanly(frameworks) is None and _import_cleanly(load_frameworks()) is None:
                _Server(control, driver).run()
    except BecomeDriver:
        raise
    except BaseException:  # fit() will start another server
        os._exit(1)
    os._exit(1)


def _close_inherited(*, output: bool) -> None:
    """Close the descriptors that the driver has from its own parent.

    Args:
        output: also close the output, because this process may exist for longer than the driver.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3 if output else 1):
        os.dup2(null, descriptor)
    os.close(null)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one of the directory itself
            if descriptor > 2 and os.get_inheritable(descriptor):
                os.close(descriptor)


class _Server:
    """One server process.

    Args:
        control: the connection to the driver.
        driver: a pidfd of the driver.
    """

    def __init__(self, control: socket.socket, driver: int) -> None:
        self._control = control
        self._driver = driver
        self._parent = ProcessParent(self._on_exit)
        self._tokens: dict[int, int] = {}  # by the pid of the worker
        self._pools: ThreadpoolController | None = None  # of the libraries that the driver has loaded

    def run(self) -> NoReturn:
        """Serve the driver until it exits or closes the connection. Then kill all children, and exit."""
        self._parent.begin()
        try:
            self._loop()
        finally:
            self._parent.close()
            os._exit(0)

    def _loop(self) -> None:
        watched: list[Any] = [self._control, self._parent, self._driver]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._driver in ready:
                return
            self._parent.handle()
            if self._control in ready and not self._handle():
                return

    def _handle(self) -> bool:
        received = receive(self._control)
        if received is None:
            return False
        message, descriptors = received
        if message[0] == "fork":
            self._fork(message[1], message[2], descriptors)
        elif message[0] == "prepare":
            return self._prepare(*message[1:])
        return True

    def _prepare(
        self, own: Sequence[str], preload: Sequence[str], environment: Mapping[str, str], module_path: Sequence[str]
    ) -> bool:
        """Import what the first group needs. Return False if a module has started threads."""
        # The driver has loaded the libraries, so they start as many threads as this machine has cores. Imported here,
        # because threadpoolctl sets an environment variable.
        from threadpoolctl import ThreadpoolController

        sys.path[:] = module_path
        os.environ.clear()
        os.environ.update({**_WITHOUT_THREADS, **environment})
        _import_all(own)
        if _import_cleanly(preload) is not None:
            return False
        load_frameworks()
        self._pools = ThreadpoolController()
        self._send(("prepared",))
        return True

    def _fork(self, token: int, request: ForkRequest, descriptors: Sequence[int]) -> None:
        gc.freeze()
        pid = self._parent.fork_worker(partial(self._serve, request, descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        self._tokens[pid] = token
        self._send(("forked", token, pid))

    def _serve(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Run as a worker."""
        gc.enable()
        self._control.close()
        os.close(self._driver)
        connection, output, stacks = descriptors
        _redirect(output)
        dump_stacks_on_signal(stacks)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.working_directory)
        sys.path[:] = request.module_path
        if self._pools is not None and (threads := worker_threads()) is not None:
            _limit(self._pools, threads)
            limit_threads(threads)
        reseed()
        handlers = ExitHandlers()
        with socket.socket(fileno=connection) as to_driver:
            serve(Channel(to_driver))
            finish_process(handlers)

    def _on_exit(self, pid: int, exit_code: int) -> None:
        self._send(("exited", self._tokens.pop(pid), exit_code))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the driver has exited; the loop will notice that
            send(self._control, message)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        # A worker that needs the module raises the same error in the backend's setup, where it is reported.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _import_cleanly(names: Sequence[str]) -> str | None:
    """Import modules up to the first one that starts threads, and return its name; None if no module does."""
    for name in names:
        _import_all([name])
        if not forks_cleanly():
            return name
    return None


def _limit(pools: ThreadpoolController, threads: int) -> None:
    """Limit the threads of libraries, except for those whose own variable sets a number."""
    for pool in pools.lib_controllers:
        has_own = f"{pool.internal_api.upper()}_NUM_THREADS" in os.environ
        if pool.num_threads > threads and not has_own:
            pool.set_num_threads(threads)


def forks_cleanly() -> bool:
    """Return True if this process has only one thread.

    If it has several, fork once and count again, because some libraries stop their threads on a fork.
    """
    if len(os.listdir("/proc/self/task")) == 1:
        return True
    pid = fork_process()
    if pid == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # this process ignores SIGCHLD
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _redirect(output: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
