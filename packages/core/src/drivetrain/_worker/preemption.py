"""How all ranks learn of a preemption at the same step, without a barrier while there is none.

A train function that can end early asks in each step, which costs the count of a number. When there is a reason to end,
the controller has every rank say how often it has asked, and from then on the next question waits. The controller names
the step, one more than the highest number, and the ranks go on: each is told when it has asked so often. Ranks that
ask once per step of a collective loop are at most one step apart, so none waits for one that waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drivetrain._wire.events import Asking, Counted, Event, Renumbered

__all__ = ["Preemption", "PreemptionInfo", "Signals"]

_AGREEMENT_S = 60.0


@dataclass(frozen=True, slots=True)
class PreemptionInfo:
    """Why the train function is to save its state and return.

    Attributes:
        reason: in words.
        deadline: Unix time in seconds at which the processes are ended if they are still there.
    """

    reason: str
    deadline: float


class Preemption:
    """A rank's side of the agreement.

    Args:
        rank: whose.
        tell: delivers an event to the controller.
        before: called with each question; where the controller is in this process, it takes its turn there.
    """

    def __init__(self, rank: int, tell: Callable[[Event], None], before: Callable[[], None] | None = None) -> None:
        self.rank = rank
        self.tell = tell
        self._before = before
        self._count = 0
        self._asked = False
        self._step: int | None = None
        self._info: PreemptionInfo | None = None
        self._settled = threading.Condition()
        self.was_told = False
        self.is_over = False
        self.renumber: Callable[[int, int], None] = lambda number, quiet: None

    @property
    def is_watched(self) -> bool:
        """Whether the train function has ever asked, and runs."""
        return self._count > 0 and not self.is_over

    def poll(self) -> PreemptionInfo | None:
        """The train function asks."""
        if not self._count:
            _take_back_sigterm()
            self.tell(Asking(self.rank))
        self._count += 1  # before the look at what the other thread sets before it looks at this
        if self._before is not None:
            self._before()
        if not self._asked:
            return None
        with self._settled:
            # Bounded for a driver that is gone without a word.
            if not self._settled.wait_for(lambda: self._step is not None, _AGREEMENT_S):
                return None
        assert self._step is not None
        if self._count < self._step:
            return None
        self.was_told = True
        return self._info

    def count(self) -> None:
        """The controller wants to know how often the function has asked; from now on its questions wait."""
        self._asked = True
        self.tell(Counted(self.rank, self._count))

    def follow(self, number: int, quiet: int) -> None:
        """Another rank was replaced: the next report of this one is to come after that number, as the new one's.

        Its questions are counted anew as well, as those of the new rank are.
        """
        self._count = 0
        self.renumber(number, quiet)
        self.tell(Renumbered(self.rank))

    def settle(self, step: int, info: PreemptionInfo) -> None:
        """The controller has said at which question the function is told."""
        with self._settled:
            self._step, self._info = step, info
            self._settled.notify_all()


def _take_back_sigterm() -> None:
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
