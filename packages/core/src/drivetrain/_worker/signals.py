"""SIGTERM in a worker process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

__all__ = ["Signals", "take_back_sigterm"]


def take_back_sigterm() -> None:
    """Has Python handle SIGTERM again where a library has put a handler in C in its place, as TensorFlow does."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


class Signals:
    """Tells another thread of a SIGTERM, even while the main thread is in C code; made on the main thread."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
        self._masks = threading.local()

    def fileno(self) -> int:
        """The descriptor that can be read after a signal."""
        return self._read.fileno()

    def take(self) -> bool:
        """Whether a SIGTERM has come that the train function does not handle itself."""
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in self._read.recv(4096) and signal.getsignal(signal.SIGTERM) == self._handle
        return False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watches for the time of a ``with`` block."""
        before = signal.signal(signal.SIGTERM, self._handle)
        descriptor = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # A process that the train function forks, a data loader's worker say, is ended by a signal of its own.
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._forget)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, before)

    def _handle(self, number: int, frame: object) -> None:
        """Told the other thread already, unless an event loop has taken the descriptor for the time that it runs."""
        with contextlib.suppress(OSError):
            self._write.send(bytes((number,)))

    def _hold(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._release()
