"""Stop all ranks at the same step without a barrier in every step.

Each rank counts its calls to ``get_preemption_info()``: its steps. When the ranks are to stop, the driver requests
every rank's count with ``CountSteps``; from then on, the next call on each rank waits. The driver replies with
``StopAfter`` and the stop step, which is the highest count plus one. The ranks continue, and each call returns the
notice once its count reaches the stop step. Ranks that make one call per step of a collective loop are at most one step
apart, so none of them waits for a rank that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from drivetrain._wire.events import Event, PreemptionInfo, PreemptionPolled, StepsCounted
from drivetrain._worker.signals import restore_sigterm_handler

__all__ = ["Preemption"]

_STOP_STEP_WAIT_S = 60.0


class Preemption:
    """A rank's part of the agreement on the stop step.

    Args:
        rank: the rank.
        emit: sends an event to the driver.
        before_poll: called in each poll, if given; the in-process runtime handles interrupts there.
    """

    def __init__(self, rank: int, emit: Callable[[Event], None], before_poll: Callable[[], None] | None = None) -> None:
        self._rank = rank
        self._emit = emit
        self._before_poll = before_poll
        self._steps = 0
        self._waits_for_stop_step = False
        self._stop_step: int | None = None
        self._info: PreemptionInfo | None = None
        self._changed = threading.Condition()
        self.was_notified = False

    @property
    def is_polled(self) -> bool:
        """True if the train function has polled since its start or since the last renumbering."""
        return self._steps > 0

    def poll(self) -> PreemptionInfo | None:
        """Begin a step, on the train function's thread. Return the notice from the stop step on."""
        if not self._steps:
            restore_sigterm_handler()
            self._emit(PreemptionPolled(self._rank))
        self._steps += 1  # before reading the flag that count_steps() sets before it reads this
        if self._before_poll is not None:
            self._before_poll()
        if not self._waits_for_stop_step:
            return None
        # The timeout is for a driver that was lost before it sent the step.
        stop_step = self.wait_for_stop_step(_STOP_STEP_WAIT_S)
        if stop_step is None or self._steps < stop_step:
            return None
        self.was_notified = True
        return self._info

    def wait_for_stop_step(self, timeout_s: float) -> int | None:
        """Wait for the driver's stop step. Return None if it does not arrive in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop_step is not None, timeout_s)
            return self._stop_step

    def count_steps(self) -> None:
        """Send the number of steps. The next step waits for :meth:`stop_after`."""
        self._waits_for_stop_step = True
        self._emit(StepsCounted(self._rank, self._steps))

    def stop_after(self, step: int, info: PreemptionInfo) -> None:
        """Set the step at which :meth:`poll` returns the notice."""
        with self._changed:
            self._stop_step, self._info = step, info
            self._changed.notify_all()

    def restart_count(self) -> None:
        """Count steps from 0, like a new process that replaces a lost rank."""
        self._steps = 0
