"""A descriptor with which a thread or a signal handler wakes a thread that waits for several things at once."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from typing import Protocol

__all__ = ["MAX_POLL_S", "HasDescriptor", "Wakeup"]

MAX_POLL_S = 1000.0
"""The longest wait in one call of ``poll``, which accepts no more than 24 days. Longer waits repeat the call."""

_MAX_BYTES = 4096


class HasDescriptor(Protocol):
    """Anything that can be waited for: a socket, a pipe, or a :class:`Wakeup`."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""


class Wakeup:
    """A pair of connected sockets: one becomes readable when something is written to the other.

    Neither end ever blocks. A full buffer loses nothing, because the waiting thread wakes up anyway.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable after :meth:`wake`."""
        return self._read.fileno()

    def wake(self, data: bytes = b"\0") -> None:
        """Make the descriptor readable. Any thread and any signal handler may call this method.

        Args:
            data: what :meth:`drain` will return. The default is no number of a signal.
        """
        with contextlib.suppress(OSError):  # the buffer is full, or the other thread has stopped waiting
            self._write.send(data)

    def drain(self) -> bytes:
        """Make the descriptor unreadable again, and return everything that was written."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            while part := self._read.recv(_MAX_BYTES):
                received += part
        return received

    def wait(self, timeout_s: float) -> bool:
        """Wait until the descriptor is readable. Return False after the timeout."""
        return bool(select.select([self._read], [], [], timeout_s)[0])

    def receive_signals(self) -> int:
        """Let Python write the number of each signal that has a handler. Only the main thread may call this method.

        Returns:
            The descriptor to which Python wrote them before, for :func:`signal.set_wakeup_fd`; -1 for none.
        """
        return signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Close both ends."""
        self._read.close()
        self._write.close()
