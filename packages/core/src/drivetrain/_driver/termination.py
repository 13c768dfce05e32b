"""Asks all ranks to save after the same step: before a preemption, or before the run grows. Sends signals to scripts.

:mod:`drivetrain._worker.preemption` is the counterpart in the worker.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from drivetrain._base.failure import Failure
from drivetrain._driver.outcomes import AttemptFailed, Grow
from drivetrain._driver.ranks import Ranks
from drivetrain._driver.services import RunServices
from drivetrain._driver.states import AttemptState, StateMachine, Trigger
from drivetrain._runtimes.base import Group
from drivetrain._wire.commands import CountSteps, Interrupt, StopAfter
from drivetrain._wire.events import Draining, PreemptionInfo, Returned, StepsCounted
from drivetrain.errors import FailureKind

__all__ = ["Termination"]


class Termination:
    """Decides when the ranks of one attempt should save and return early, and asks them to do so.

    Args:
        services: the services of the run; ``services.interrupts.can_end_gracefully`` is True if the train function
            polls for preemptions, so that ranks can save before they are terminated.
        group: the group of the attempt.
        ranks: the ranks of the attempt.
        machine: the state machine, which receives the triggers of preemption and growth.
        target_size: returns the number of workers that an elastic run could have now. A call may take seconds.
    """

    def __init__(
        self,
        services: RunServices,
        group: Group,
        ranks: Ranks,
        machine: StateMachine,
        target_size: Callable[[], int],
    ) -> None:
        self._services = services
        self._group = group
        self._ranks = ranks
        self._machine = machine
        self._target_size = target_size
        self._sizes_compared_at = time.monotonic()
        self._next_size = 0
        self._grace_s = services.run.run_config.failure_config.preemption_grace_s
        self._draining: Draining | None = None
        self._notice: PreemptionInfo | None = None
        self._steps: dict[int, int] = {}
        self._returned: list[Returned] = []

    @property
    def grace_s(self) -> float:
        """The maximum time in seconds for the ranks to save and return."""
        return self._grace_s

    def request_preemption(self, reason: str, ranks: tuple[int, ...] = ()) -> None:
        """Ask the ranks to save and return because processes will be terminated or the driver was interrupted.

        Args:
            reason: see :class:`~drivetrain.PreemptionInfo`.
            ranks: see :class:`~drivetrain.PreemptionInfo`.
        """
        is_new = self._machine.apply(Trigger.PREEMPTION_REQUESTED)
        if self._machine.state not in (AttemptState.PREEMPTING, AttemptState.STOPPING):
            return
        self._ask_to_save(reason)
        if self._notice is not None:
            ranks = tuple(sorted({*self._notice.ranks, *ranks}))
            self._notice = replace(self._notice, reason=reason if is_new else self._notice.reason, ranks=ranks)

    def send_signal(self, reason: str, number: int) -> None:
        """Send a signal that the driver has received to the script that the ranks run, and give it time to handle it.

        Args:
            reason: the reason, for the message.
            number: the number of the signal.
        """
        if not self._machine.apply(Trigger.SIGNAL_SENT) or self._machine.state is not AttemptState.INTERRUPTING:
            return
        run, name = self._services.run, signal.Signals(number).name
        run.console.print(
            f"{run.name}: {reason}: {name} was sent to all ranks, which have {self.grace_s:.3g} s to handle it; "
            "repeat it to end them at once",
            error=True,
        )
        self._group.send(sorted(self._ranks.active), Interrupt(number))

    def on_draining(self, event: Draining) -> None:
        """Record that the nodes of ranks will be terminated."""
        self._draining = event
        self.consider_draining()

    def consider_draining(self) -> None:
        """Ask the ranks to save if a node will be terminated, and the train function polls for preemptions.

        Otherwise the ranks cannot save on request, and continue until the node is terminated.
        """
        draining, now = self._draining, time.time()
        if draining is None or not self._services.interrupts.can_end_gracefully:
            return
        self._draining = None
        if self._notice is None and draining.deadline is not None:
            self._grace_s = max(0.0, draining.deadline - now)
        self.request_preemption(draining.reason, draining.ranks)

    def consider_growth(self) -> None:
        """Let an elastic run grow if there is room for more workers. Called after each commit.

        The room is determined at most once per ``elastic_resize_monitor_interval_s``.
        """
        scaling, size = self._services.run.scaling_config, len(self._ranks)
        if self._machine.state is not AttemptState.RUNNING or size >= scaling.max_workers or not self._ranks.active:
            return
        if time.monotonic() - self._sizes_compared_at < scaling.elastic_resize_monitor_interval_s:
            return
        self._sizes_compared_at = time.monotonic()
        self._next_size = self._target_size()
        if self._next_size <= size:
            return
        if self._services.interrupts.can_end_gracefully:
            self._machine.apply(Trigger.GROWTH_REQUESTED)
            self._ask_to_save(f"there is room for {self._next_size} workers")
        else:
            self._machine.apply(Trigger.GROWTH_WITHOUT_SAVING)

    def on_steps_counted(self, event: StepsCounted) -> None:
        """Record the step count of a rank."""
        self._steps[event.rank] = event.steps
        self._set_stop_step()

    def on_return(self, event: Returned) -> None:
        """Record that the train function of a rank returned."""
        self._returned.append(event)
        self._set_stop_step()

    def note_all_returned(self) -> None:
        """Record that all ranks have returned. The attempt has succeeded unless a rank's work is unfinished."""
        is_finished = not any(event.unfinished for event in self._returned)
        if is_finished and self._machine.state in (AttemptState.PREEMPTING, AttemptState.GROWING):
            self._warn_of_early_returns()
        self._machine.apply(Trigger.ALL_RETURNED if is_finished else Trigger.ALL_SAVED)

    def _warn_of_early_returns(self) -> None:
        """Warn if ranks may have returned because of the notice, without saying so."""
        if ranks := sorted(event.rank for event in self._returned if event.at_notice):
            run = self._services.run
            warning = (
                f"[DT-421] the train function has finished: ranks {ranks} returned right after the preemption notice. "
                "If work was left, call drivetrain.resume_later() before the return, and resume the run"
            )
            run.console.print(f"{run.name}: {warning}", error=True)

    def preempted_ending(self) -> AttemptFailed:
        """Return how an attempt in the state ``PREEMPTED`` ended."""
        how = "all ranks returned after the same step"
        if self._ranks.active:
            how = f"ranks {sorted(self._ranks.active)} did not return within {self.grace_s:.3g} s"
            if self.grace_s == self._services.run.run_config.failure_config.preemption_grace_s:
                how += " (FailureConfig.preemption_grace_s)"
        reason = self._notice.reason if self._notice is not None else ""
        summary = f"preempted: {reason}; {how}"
        return AttemptFailed(Failure(kind=FailureKind.PREEMPTION, summary=summary))

    def grown_ending(self) -> Grow:
        """Return how an attempt in the state ``GROWN`` ended."""
        return Grow(self._next_size)

    def _ask_to_save(self, reason: str) -> None:
        if self._notice is not None:
            return
        self._notice = PreemptionInfo(reason, time.time() + self.grace_s)
        run = self._services.run
        run.console.print(
            f"{run.name}: {reason}: asking all ranks to save and exit at the same step, within {self.grace_s:.3g} s",
            error=True,
        )
        self._group.send(sorted(self._ranks.active), CountSteps())

    def _set_stop_step(self) -> None:
        """Once every active rank has sent its step count, send all ranks the stop step: the highest count plus one."""
        if self._notice is None or not self._steps or len(self._steps) < len(self._ranks.active):
            return
        if self._ranks.active - self._steps.keys():
            return
        step = max(self._steps.values()) + 1
        self._steps.clear()
        self._group.send(sorted(self._ranks.active), StopAfter(step, self._notice))
