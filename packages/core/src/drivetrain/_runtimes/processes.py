"""Helpers for processes that fork workers, and that adopt and kill the processes that workers leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
import warnings
from typing import Protocol
from weakref import WeakSet

__all__ = [
    "ForkedProcess",
    "adopt_orphans",
    "await_exit",
    "children",
    "close_in_forked_children",
    "die_with_parent",
    "fork_process",
    "kill_group",
    "uses_accelerator",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ACCELERATORS = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/accel", "/dev/vfio")


def adopt_orphans() -> None:
    """Make the kernel turn each descendant of this process whose parent exits into a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork_process() -> int:
    """Fork this process, as :func:`os.fork` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, from 3.12 on
        return os.fork()


class ForkedProcess:
    """A child that this process has forked, with the methods of :class:`subprocess.Popen` that a server needs.

    Args:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._has_exited = False

    def poll(self) -> int | None:
        """Return None if it is running, and otherwise 0: nothing depends on its exit code."""
        if not self._has_exited:
            try:
                self._has_exited = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            except ChildProcessError:  # other code has reaped it, or this process ignores the exit of children
                self._has_exited = True
        return 0 if self._has_exited else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit of the process.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(descriptor, select.POLLIN)
                if not poller.poll(None if timeout is None else 1000 * timeout):
                    raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            finally:
                os.close(descriptor)
            self.poll()
        return 0

    def kill(self) -> None:
        """Kill the process, unless this process has changed its user, and is not allowed to."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class _Closable(Protocol):
    def close(self) -> object: ...


_closed_in_children: WeakSet[_Closable] = WeakSet()


def close_in_forked_children(connection: _Closable) -> None:
    """Close a socket or an unbuffered pipe in each child that this process forks, even if other code forks it.

    Otherwise, the other end of the connection would not notice the exit of this process while the child is running.
    """
    _closed_in_children.add(connection)


def _close_connections() -> None:
    for connection in list(_closed_in_children):
        connection.close()
    _closed_in_children.clear()


os.register_at_fork(after_in_child=_close_connections)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits. Exit if the parent has already exited.

    Args:
        parent: the pid of the parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call of prctl()
        os._exit(1)


def children() -> set[int]:
    """Return the children of this process. Not every kernel lists them, so this reads the parent of each process."""
    found: set[int] = set()
    for name in os.listdir("/proc") if _has_children() else ():
        with contextlib.suppress(OSError):  # not a process, or it has exited
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(name))
    return found


def await_exit(pid: int, deadline: float) -> None:
    """Wait until a child has exited, and reap it; return without an error at a time of the monotonic clock."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has been reaped
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(descriptor)
        os.waitpid(pid, os.WNOHANG)


def kill_group(pid: int, number: int) -> None:
    """Send a signal to a child and, once it has created its process group, to this group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)


def uses_accelerator() -> bool:
    """Return True if this process has opened an accelerator. Its drivers do not work in a fork."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the directory itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_ACCELERATORS):
                return True
    return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
