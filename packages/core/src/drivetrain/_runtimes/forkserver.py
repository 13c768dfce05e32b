"""The process that local workers are forked from.

It imports the framework once, before any worker exists, and stays: N workers pay one import, and a restart, or the
next ``fit()`` of the same driver, pays none. It forks only while it has one thread, touches no accelerator, reaps its
children the moment they end, and ends all of them, with whatever processes they started, when the driver is gone, a
``kill -9`` of the driver included; should it die itself, the kernel ends its children.

It talks to the driver over a stream socket. The driver sends ``("fork", token, ForkRequest)`` with the worker's file
descriptors, and ``("warm", modules)``; it answers ``("forked", token, pid)`` and ``("exited", token, exit code)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import random
import select
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from drivetrain._wire.frames import Channel
from drivetrain._worker.main import serve
from drivetrain._worker.stacks import dump_stacks_on_signal

__all__ = ["ForkRequest", "main", "receive", "send"]

_HEADER = struct.Struct(">I")
_MAX_DESCRIPTORS = 8
_PR_SET_PDEATHSIG = 1
_WARMUP_NICENESS = 5  # workers that have just started want the cores more


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkRequest:
    """What a worker process starts with. Its descriptors come beside: line to the controller, output, stacks."""

    environment: Mapping[str, str]
    working_directory: str
    module_path: Sequence[str]


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Sends a message, with file descriptors beside it."""
    body = pickle.dumps(message)
    socket.send_fds(connection, [_HEADER.pack(len(body))], descriptors)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its file descriptors, or None when the other end has closed."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, _MAX_DESCRIPTORS)
        data = bytearray(head)
        while len(data) < _HEADER.size or len(data) < _HEADER.size + _HEADER.unpack_from(data)[0]:
            wanted = _HEADER.size if len(data) < _HEADER.size else _HEADER.size + _HEADER.unpack_from(data)[0]
            part = connection.recv(wanted - len(data))
            if not part:
                return None
            data += part
    except ConnectionError:
        return None
    return pickle.loads(data[_HEADER.size :]), descriptors


def main(control_descriptor: int, preload: Sequence[str], driver_pid: int) -> None:
    """Serves the driver until it closes the line or dies; never returns to a caller with children left."""
    # Collections would cost an import a tenth of its time, and later touch, and so copy, what workers share.
    gc.disable()
    control = socket.socket(fileno=control_descriptor)
    server = _Server(control, driver_pid)
    # pyarrow's allocator, which pandas brings along, would start one at import; workers get the driver's environment.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    _import_public_names()
    culprit = _import_cleanly(preload)
    if culprit is not None:
        # It started threads, which a fork would lose with the locks they hold: begin again without it.
        os.set_inheritable(control_descriptor, True)
        rest = tuple(name for name in preload if name != culprit)
        code = f"import sys; sys.path[:] = {sys.path!r}; from drivetrain._runtimes import forkserver as f; " + (
            f"f.main({control_descriptor}, {rest!r}, {driver_pid})"
        )
        os.execv(sys.executable, [sys.executable, "-c", code])
    try:
        server.loop()
    finally:
        server.end_children()
        os._exit(0)


class _Server:
    def __init__(self, control: socket.socket, driver_pid: int) -> None:
        self._control = control
        self._tokens: dict[int, int] = {}  # pid -> token
        self._warmup: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._driver = os.pidfd_open(driver_pid)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the descriptor below is written to
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def loop(self) -> None:
        """Handles whatever comes, until the driver is gone."""
        watched: list[Any] = [self._control, self._wake_read, self._driver]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._driver in ready:
                return
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
            self._reap()
            if self._control in ready and not self._handle():
                return

    def end_children(self) -> None:
        for pid in self._tokens:
            _kill_group(pid, signal.SIGKILL)
        for pid in self._tokens:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _handle(self) -> bool:
        received = receive(self._control)
        if received is None:
            return False
        message, descriptors = received
        if message[0] == "fork":
            self._fork(message[1], message[2], descriptors)
        elif message[0] == "warm":
            self._warmup = threading.Thread(target=_warm_up, args=(message[1],))
            self._warmup.start()
        return True

    def _fork(self, token: int, request: ForkRequest, descriptors: Sequence[int]) -> None:
        if self._warmup is not None:  # a fork wants a single thread
            self._warmup.join()
            self._warmup = None
        gc.freeze()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: about threads, which _forks_cleanly saw to
            pid = os.fork()
        if pid == 0:
            self._become_worker(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._tokens[pid] = token
        self._send(("forked", token, pid))

    def _become_worker(self, request: ForkRequest, descriptors: Sequence[int]) -> NoReturn:
        status = 1
        try:
            server_pid = os.getppid()
            os.setsid()  # its own process group, so that it can be ended together with what it starts
            _die_with_parent(server_pid)
            gc.enable()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for ours in (self._control, self._wake_read, self._wake_write):
                ours.close()
            os.close(self._driver)
            line, output, stacks = descriptors
            _redirect(output)
            faulthandler.enable()
            dump_stacks_on_signal(stacks)
            os.environ.clear()
            os.environ.update(request.environment)
            os.chdir(request.working_directory)
            sys.path[:] = request.module_path
            _reseed()
            serve(Channel(socket.socket(fileno=line)))
            status = 0
        except BaseException:  # nothing may return into the server's loop; the log gets the traceback
            sys.excepthook(*sys.exc_info())
        finally:
            # Not a normal exit: frameworks' exit handlers are known to hang or abort in a process that has
            # used collectives, and everything worth keeping is flushed.
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._tokens:
            try:
                # Looked at first and reaped last: while it is a zombie, its process group cannot be somebody else's.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            _kill_group(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            token = self._tokens.pop(ended.si_pid, None)
            if token is not None:
                self._send(("exited", token, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the driver is gone, which the loop sees next
            send(self._control, message)


def _import_public_names() -> None:
    """Imports the names that train functions and plugins import from drivetrain, once for all workers."""
    facade = importlib.import_module("drivetrain")
    for name in facade.__all__:
        getattr(facade, name)
    importlib.import_module("drivetrain.plugin")  # tasks are unpickled by its names; else every worker would import it
    pkgutil.resolve_name("drivetrain:RunConfig")  # compiles a pattern on its first call, as every worker would


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        # A worker that needs the module meets the same error where it can be told, in the backend's set-up.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _import_cleanly(names: Sequence[str]) -> str | None:
    """Imports modules up to the first after which this process has threads, and returns that one's name."""
    for name in names:
        _import_all([name])
        if not _forks_cleanly():
            return name
    return None


def _warm_up(names: Sequence[str]) -> None:
    """Imports on a thread of its own, which the next fork waits for."""
    os.setpriority(os.PRIO_PROCESS, 0, _WARMUP_NICENESS)  # of this thread alone, on Linux
    _import_all(names)


def _forks_cleanly() -> bool:
    """Whether this process has one thread; libraries that end theirs around a fork get the chance to."""
    if len(os.listdir("/proc/self/task")) == 1:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be watched
        os._exit(1)


def _kill_group(pid: int, number: int) -> None:
    for kill in (os.killpg, os.kill):  # the second for a worker that has not made itself a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)


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


def _reseed() -> None:
    """Gives each worker random numbers of its own where no seed is set, as a process started afresh has."""
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
