"""Requests to end a run early: a signal to the driver, or a call from another thread of the driver.

The first request ends the run gracefully if the train function polls for preemption: all ranks save and return after
the same step. If the train function is a script, the first signal is sent to it on every rank, as under ``torchrun``,
and it has time to handle the signal. The second request ends the run at once, and so does the first one otherwise.

Python runs a signal handler on the main thread, and only between two bytecodes. A signal that arrives just before the
main thread enters a blocking system call, or that the kernel delivers to another thread, does not interrupt that call:
the handler runs when the call returns for another reason. Therefore the driver never waits for events alone. Python's C
code writes the number of each signal to a socket (``signal.set_wakeup_fd``), and the controller waits for that socket
together with everything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from drivetrain._base.wakeup import Wakeup

__all__ = ["Interrupts"]

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The signals that request the end of a run, each with its default handler."""

if hasattr(signal, "SIGHUP"):  # not on Windows
    _DEFAULTS[signal.SIGHUP] = signal.SIG_DFL

_NO_DESCRIPTOR = -1
_REQUEST = b"\0"  # no signal has this number


class Interrupts:
    """The requests to end one run.

    Attributes:
        can_end_gracefully: True if the train function polls for preemption, so that it can save before it returns.
        signals_reach_ranks: True if the train function is a script in other processes, which handles signals itself.
        error: the exception that the driver raises after the run has ended; None without a request.
    """

    def __init__(self) -> None:
        self.can_end_gracefully = False
        self.signals_reach_ranks = False
        self.error: BaseException | None = None
        self._request: tuple[str, int | None] = ("", None)
        self._at_once = False
        self._handler: Callable[[str, int | None], None] | None = None
        self._is_handled = False
        self._replaced: dict[int, Any] = {}
        self._forward_to = _NO_DESCRIPTOR
        self._handlers = {
            number: self._on_sigint if number == signal.SIGINT else self._on_termination for number in _DEFAULTS
        }
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the end of the run is requested or a signal arrives."""
        return self._wakeup.fileno()

    def request(self, reason: str, error: BaseException, number: int | None = None, *, at_once: bool = False) -> bool:
        """Request the end of the run. Any thread and any signal handler may call this method.

        Args:
            reason: why the run should end, as text for messages.
            error: the exception that the driver raises after the run has ended.
            number: the number of the signal that requests it; None if no signal does.
            at_once: True if the run cannot save anything any more.

        Returns:
            True if the run should end at once.
        """
        can_send_signal = self.signals_reach_ranks and number is not None and self._handler is not None
        can_end = self.can_end_gracefully or can_send_signal
        self._at_once = at_once or self.error is not None or not can_end
        self.error, self._request = error, (reason, number)
        self._wakeup.wake(_REQUEST)
        return self._at_once

    def act(self) -> None:
        """Handle a pending request. Raise ``error`` if the run should end at once.

        :meth:`fileno` then becomes readable again, because several threads may wait for it.
        """
        self._drain()
        if self.error is None:
            return
        if self._at_once:
            self._wakeup.wake(_REQUEST)
            raise self.error
        if self._handler is not None and not self._is_handled:
            self._is_handled = True
            self._handler(*self._request)

    @contextlib.contextmanager
    def handled_by(self, handler: Callable[[str, int | None], None]) -> Iterator[None]:
        """Pass the first request to a handler during a ``with`` block, if it need not end the run at once.

        Args:
            handler: called with the reason of the request and the number of the signal, on the controller's thread.
        """
        self._handler = handler
        try:
            yield
        finally:
            self._handler, self.can_end_gracefully = None, False

    def close(self) -> None:
        """Close the sockets."""
        self._wakeup.close()

    @contextlib.contextmanager
    def from_signals(self) -> Iterator[None]:
        """Make SIGINT, SIGTERM and SIGHUP request the end of the run during a ``with`` block.

        A signal that other code handles already is left to that code. Such a signal makes :meth:`fileno` readable too,
        so its handler runs without delay. If other code has set a wakeup descriptor, as an event loop does, the numbers
        of all signals are forwarded to that descriptor. On other threads than the main thread, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._forward_to = self._wakeup.receive_signals()
        try:
            for number, ours in self._handlers.items():
                if signal.getsignal(number) == _DEFAULTS[number]:  # nohup, for example, ignores SIGHUP
                    self._replaced[number] = signal.signal(number, ours)
            yield
        finally:
            try:
                for replaced, before in self._replaced.items():
                    signal.signal(replaced, before)
                self._replaced.clear()
            finally:
                self._restore_wakeup()
                self._drain()

    def replace_handlers_of(self, package: str) -> None:
        """Replace the signal handlers that a library has set, until the block of :meth:`from_signals` ends.

        Outside of that block, and on other threads than the main thread, this does nothing.

        Args:
            package: the top-level package of the library.
        """
        if not self._replaced or threading.current_thread() is not threading.main_thread():
            return
        for number, ours in self._handlers.items():
            current = signal.getsignal(number)
            if getattr(current, "__module__", "").partition(".")[0] == package:
                self._replaced[number] = signal.signal(number, ours)

    def _restore_wakeup(self) -> None:
        try:
            signal.set_wakeup_fd(self._forward_to)
        except (OSError, ValueError):  # other code closed its descriptor during the run
            signal.set_wakeup_fd(_NO_DESCRIPTOR)

    def _drain(self) -> None:
        """Forget what has arrived. If other code had set a wakeup descriptor, forward the signal numbers to it."""
        numbers = self._wakeup.drain().replace(_REQUEST, b"")
        if self._forward_to != _NO_DESCRIPTOR and numbers:
            with contextlib.suppress(OSError):  # the descriptor was closed, or its buffer is full
                os.write(self._forward_to, numbers)

    def _on_sigint(self, number: int, frame: object) -> None:
        if self.request("interrupted (Ctrl-C)", KeyboardInterrupt(), number):
            raise KeyboardInterrupt

    def _on_termination(self, number: int, frame: object) -> None:
        status = 128 + number  # the exit code that a shell reports for a process killed by the signal
        if self.request(f"the driver received {signal.Signals(number).name}", SystemExit(status), number):
            raise SystemExit(status)
