"""Stops all ranks at the same step without a barrier in every step.

Each rank counts its calls to ``get_preemption_info()``. Each call is a step. When the ranks should stop, the driver
requests every rank's count with ``CountSteps``; from then on, the next call on each rank waits. The driver replies with
``StopAfter`` and the stop step, which is the highest count plus one. The ranks continue, and a call returns the notice
once the rank's count has reached the stop step.

If the ranks make one call in each iteration of a loop with collectives, they are at most one step apart. Therefore, a
waiting call does not keep another rank from reaching its own next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from drivetrain._wire.events import Event, PreemptionInfo, PreemptionPolled, StepsCounted
from drivetrain._worker.signals import restore_sigterm_handler
from drivetrain.errors import SessionError

__all__ = ["Preemption", "StopTraining"]

_STOP_STEP_WAIT_S = 60.0


class StopTraining(BaseException):
    """Ends a train function that has saved its state after a preemption notice. The worker treats it as a return.

    It is not an ``Exception``, so that handlers of the train function do not catch it by mistake. ``finally`` blocks
    are executed.
    """


class Preemption:
    """One rank's side of the protocol by which all ranks agree on the step to stop at.

    Args:
        rank: the rank.
        emit: sends an event to the driver.
        before_poll: called at the start of each poll, if given; the in-process runtime handles interrupts in this call.

    Attributes:
        was_notified: True if :meth:`poll` has returned a notice.
        reports_since_notice: the number of reports since then.
        is_unfinished: True if the train function has called :meth:`resume_later`.
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
        self.reports_since_notice = 0
        self.is_unfinished = False

    @property
    def is_polled(self) -> bool:
        """True if :meth:`poll` was called since the start of the train function or the last :meth:`restart_count`."""
        return self._steps > 0

    @property
    def steps(self) -> int:
        """The number of calls of :meth:`poll`."""
        return self._steps

    def poll(self) -> PreemptionInfo | None:
        """Count a step. Return the notice if the stop step is reached.

        This is :func:`drivetrain.get_preemption_info`, so it is called on the train function's thread.
        """
        if not self._steps:
            restore_sigterm_handler()
            self._emit(PreemptionPolled(self._rank))
        self._steps += 1  # before the flag is read, because count_steps() sets the flag before it reads the count
        if self._before_poll is not None:
            self._before_poll()
        if not self._waits_for_stop_step:
            return None
        # The wait times out if the driver was lost before it sent the stop step.
        stop_step = self.wait_for_stop_step(_STOP_STEP_WAIT_S)
        if stop_step is None or self._steps < stop_step:
            return None
        self.was_notified = True
        return self._info

    def resume_later(self) -> None:
        """Note that the train function returns because of the notice, before its work is done.

        This is :func:`drivetrain.resume_later`.

        Raises:
            SessionError: :meth:`poll` has not returned a notice.
        """
        if not self.was_notified:
            raise SessionError(
                "[DT-420] resume_later(): expected a call after get_preemption_info() has returned a notice, got one "
                "without a notice. Without a notice, return only when the work is done"
            )
        self.is_unfinished = True

    def note_report(self) -> None:
        """Note that the train function has made a report."""
        self.reports_since_notice += self.was_notified

    def describe_return(self) -> tuple[bool, bool]:
        """Return the last two fields of :class:`~drivetrain._wire.events.Returned`."""
        return self.is_unfinished, self.was_notified and self.reports_since_notice <= 1

    def wait_for_stop_step(self, timeout_s: float) -> int | None:
        """Wait for the driver to send the stop step. Return None if the step does not arrive in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop_step is not None, timeout_s)
            return self._stop_step

    def count_steps(self) -> None:
        """Send the number of steps to the driver. The next call to :meth:`poll` waits for :meth:`stop_after`."""
        self._waits_for_stop_step = True
        self._emit(StepsCounted(self._rank, self._steps))

    def stop_after(self, step: int, info: PreemptionInfo) -> None:
        """Set the stop step, and the notice that :meth:`poll` returns from this step on."""
        with self._changed:
            self._stop_step, self._info = step, info
            self._changed.notify_all()

    def restart_count(self) -> None:
        """Restart the count at 0, as in the new process that replaces a lost rank."""
        self._steps = 0
