"""Handles SIGTERM in a worker process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from drivetrain._base.wakeup import Wakeup

__all__ = ["Signals", "restore_sigterm_handler"]


def restore_sigterm_handler() -> None:
    """Set Python's SIGTERM handler again, in case a library such as TensorFlow has set a handler written in C."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


class Signals:
    """Notifies another thread of SIGTERM, even while the main thread runs C code. Create it on the main thread."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._masks = threading.local()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal arrives."""
        return self._wakeup.fileno()

    def take(self) -> bool:
        """Return True if SIGTERM has arrived since the last call, unless the train function has set its own handler."""
        return signal.SIGTERM in self._wakeup.drain() and signal.getsignal(signal.SIGTERM) == self._handle

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for SIGTERM during a ``with`` block."""
        before = signal.signal(signal.SIGTERM, self._handle)
        descriptor = self._wakeup.receive_signals()
        # SIGTERM must kill a process that the train function forks, such as a data loader's worker.
        os.register_at_fork(
            before=self._block_sigterm, after_in_parent=self._unblock_sigterm, after_in_child=self._reset_in_child
        )
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, before)

    def _handle(self, number: int, frame: object) -> None:
        """Notify the other thread here too, because a running event loop may have replaced the wakeup descriptor."""
        self._wakeup.wake(bytes((number,)))

    def _block_sigterm(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def _unblock_sigterm(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _reset_in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock_sigterm()
