"""Runs one attempt: processes the events of the ranks, and determines how the attempt ends.

:mod:`~drivetrain._driver.states` defines the states of an attempt. In the same package, ``delivery`` passes reports to
the callbacks, ``commits`` commits checkpoints, ``termination`` asks ranks to save and return, ``replacement`` replaces
lost ranks, and ``diagnosis`` determines the cause of a failure.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from drivetrain._driver.commits import Commits
from drivetrain._driver.delivery import Delivery
from drivetrain._driver.diagnosis import Diagnosis
from drivetrain._driver.load import Load
from drivetrain._driver.outcomes import AttemptFailed, Ending, Succeeded
from drivetrain._driver.progress import HangLimits, Progress
from drivetrain._driver.ranks import Ranks
from drivetrain._driver.replacement import Replacement
from drivetrain._driver.services import RunServices
from drivetrain._driver.states import AttemptState, StateMachine, Trigger
from drivetrain._driver.termination import Termination
from drivetrain._hooks.context import WorkerInfo
from drivetrain._runtimes.base import Group
from drivetrain._wire.events import (
    CommitOverdue,
    Draining,
    Event,
    Exited,
    Failed,
    FilesAnnounced,
    FilesClaimed,
    PhaseEntered,
    Pickled,
    PreemptionPolled,
    Renumbered,
    Reported,
    ReportNumber,
    Returned,
    SigtermReceived,
    StepsCounted,
    Uploaded,
)
from drivetrain.errors import CallbackError, StorageError

__all__ = ["Attempt"]

_LOSS_WAIT_S = 0.03
"""Seconds to wait, after a rank raised an exception, for the loss of another process that may have caused it."""

_STOP_WAIT_S = 10.0
"""Seconds that ranks have, after the stop condition is met, to complete a checkpoint that other ranks have reported."""

_EARLY_S = 600.0
"""Seconds within which an attempt without reports has made no progress. A longer one may have saved its own files."""


class Attempt:
    """One attempt of a run.

    Args:
        services: the services of the run.
        group: the group of workers.
        last_report: the report number and the iteration from which the reports of the attempt continue counting.
        target_size: see :class:`~drivetrain._driver.termination.Termination`.
    """

    def __init__(
        self, services: RunServices, group: Group, last_report: ReportNumber, target_size: Callable[[], int]
    ) -> None:
        self._run = services.run
        self._interrupts = services.interrupts
        self._group = group
        self._machine = machine = StateMachine()
        self._ranks = ranks = Ranks(group.workers, last_report, services.backend.name)
        self._delivery = Delivery(services, ranks, machine, last_report.number)
        self._commits = Commits(services, ranks, last_report.number, group.send)
        self._diagnosis = Diagnosis(services.run, ranks)
        self._termination = Termination(services, group, ranks, machine, target_size)
        self._replacement: Replacement | None = None
        self._started_at = time.monotonic()
        self._load = Load()
        self._progress = Progress(ranks, HangLimits.of(services.run.run_config.hang_timeout_s))

    @property
    def state(self) -> AttemptState:
        """The state of the attempt."""
        return self._machine.state

    @property
    def last_number(self) -> int:
        """The highest report number so far."""
        return self._delivery.last_number

    def describe(self) -> str:
        """Describe what each active rank is doing, with stacks. May be called from any thread."""
        return self._diagnosis.describe(self._group)

    def request_end(self, reason: str, number: int | None) -> None:
        """Ask the ranks to save and return if they poll for preemption, or else send them the driver's signal.

        Args:
            reason: see :class:`~drivetrain.PreemptionInfo`.
            number: the number of the signal that the driver has received; None if it has received none.
        """
        if number is None or self._interrupts.can_end_gracefully:
            self._termination.request_preemption(reason)
        else:
            self._termination.send_signal(reason, number)

    def follow(self) -> Ending:
        """Process events until the attempt ends or ranks are lost, and return how the attempt ended.

        If :attr:`replaceable` is not empty then, the caller can replace the lost ranks and call this method again.
        """
        while self._ranks.active and self.state.is_active:
            deadline = self._deadline()
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is None or remaining > 0:
                self._wait(remaining)
            elif not self._waits_for_progress:
                return self._on_deadline()
            else:
                self._group.pump(self.handle, 0.0)  # events may have arrived while the driver was busy
                if self._is_hung():
                    return self._on_deadline()
        if self.state in (AttemptState.RANKS_LOST, AttemptState.FAILED):
            self._collect_related_failures()
        elif self.state.is_active:
            self._termination.note_all_returned()
        return self._end()

    def handle(self, event: Event) -> bool:
        """Process one event; return True if the attempt is over, although ranks may still be running."""
        received_at = time.monotonic()
        self._diagnosis.update_clock_lag(event)
        self._note_commits(self._dispatch(event))
        seconds = time.monotonic() - received_at
        self._progress.note(event, seconds)
        if type(event) is Reported:
            self._load.note(seconds)
        return self.state in (AttemptState.SUCCEEDED, AttemptState.GROWN)

    def _wait(self, timeout_s: float | None) -> None:
        """Process events, or commit a checkpoint that has waited long enough for further ranks."""
        check = self._commits.next_check()
        if check is not None:
            until_check_s = max(0.0, check - time.monotonic())
            timeout_s = until_check_s if timeout_s is None else min(timeout_s, until_check_s)
        self._group.pump(self.handle, timeout_s)
        if message := self._load.describe_if_high():
            self._run.console.print(f"{self._run.name}: {message}", error=True)
        if check is not None and time.monotonic() >= check and self.state.is_active:
            self._note_commits(self._commit())

    def _note_commits(self, committed: bool) -> None:
        if committed:
            self._termination.consider_growth()
        if self.state is AttemptState.STOPPING and not self._waits_for_checkpoints:
            self._machine.apply(Trigger.CHECKPOINTS_COMPLETED)

    @property
    def _waits_for_checkpoints(self) -> bool:
        """True if a report or checkpoint is incomplete that was reported before the stop condition was met."""
        number = self._delivery.stop_number
        is_earlier_waiting = number is not None and (
            self._delivery.waits_up_to(number) or self._commits.waits_up_to(number)
        )
        return is_earlier_waiting or self._commits.is_uploading

    def _dispatch(self, event: Event) -> bool:
        """Process one event; return True if a checkpoint was committed."""
        match event:
            case Reported():
                self._delivery.note(event)
                self._commits.add(event)
                self._commits.note_combined(self._delivery.deliver(event))
                return self._commit()
            case FilesAnnounced():
                self._commits.announce(event)
                return self._commit()
            case Uploaded():
                self._commits.upload(event)
                return self._commit()
            case CommitOverdue() | FilesClaimed():
                self._commits.respond(event)
            case PhaseEntered():
                self._ranks.apply(event)
            case Returned():
                return self._on_return(event)
            case Failed():
                if self._ranks.apply(event):
                    self._diagnosis.add_exception(event)
                    self._machine.apply(Trigger.RANK_FAILED)
            case Exited():
                if self._ranks.apply(event):
                    self._diagnosis.add_loss(event)
                    self._machine.apply(Trigger.RANK_LOST)
            case PreemptionPolled():
                self._interrupts.can_end_gracefully = True
                self._termination.consider_draining()
            case Draining():
                self._termination.on_draining(event)
            case StepsCounted():
                self._termination.on_steps_counted(event)
            case SigtermReceived():
                self._ranks[event.rank].received_sigterm = True
                if event.graceful:
                    self._termination.request_preemption(
                        f"the process of rank {event.rank} received SIGTERM", ranks=(event.rank,)
                    )
            case Renumbered():
                if self._replacement is not None:
                    self._replacement.on_renumbered(event.rank)
        return False

    def _on_return(self, event: Returned) -> bool:
        if not self._ranks.apply(event):
            return False
        self._ranks[event.rank].return_value = event.value
        self._commits.finish(event.rank)
        self._commits.note_combined(self._delivery.finish(event.rank))
        committed = self._commit()
        self._termination.on_return(event)
        return committed

    def _commit(self) -> bool:
        """Commit the checkpoints that are complete; return True if there was one."""
        try:
            return self._commits.commit_complete()
        except StorageError:  # this ends the attempt, but the waiting reports have arrived
            with contextlib.suppress(CallbackError):  # the storage error remains the root cause
                self._delivery.flush()
            raise

    @property
    def replaceable(self) -> Sequence[int]:
        """The lost ranks, if new processes can replace them while the other ranks continue; otherwise empty."""
        return self._ranks.replaceable if self.state is AttemptState.RANKS_LOST else ()

    def start_replacement(self) -> Replacement:
        """Start to replace the lost ranks; return the object that coordinates the replacement."""
        self._machine.apply(Trigger.REPLACEMENT_STARTED)
        self._replacement = Replacement(self._group, self._ranks, self._machine, self.handle)
        return self._replacement

    def resume(self, lost: Sequence[int], workers: Sequence[WorkerInfo], last_report: ReportNumber) -> None:
        """Record that new processes have replaced the lost ranks, so that :meth:`follow` can continue."""
        self._machine.apply(Trigger.RANKS_REPLACED)
        self._replacement = None
        self._delivery.restart(last_report)
        self._commits.restart(last_report.number, lost)
        self._diagnosis.losses.clear()
        self._ranks.replace(lost, workers, last_report)
        self._started_at = time.monotonic()
        self._progress = Progress(self._ranks, HangLimits.of(self._run.run_config.hang_timeout_s))

    def _is_hung(self) -> bool:
        return self._waits_for_progress and bool(self._progress.stopped())

    @property
    def _waits_for_progress(self) -> bool:
        """True if only the progress of the ranks limits how long the attempt waits."""
        return self.state is AttemptState.RUNNING and not self._ranks.starting

    def _deadline(self) -> float | None:
        """Return the monotonic time at which :meth:`follow` stops waiting; None if there is no limit."""
        config = self._run.run_config
        match self.state:
            case AttemptState.STOPPING:
                uploads_s = config.sync_config.sync_timeout if self._commits.is_uploading else 0.0
                return self._machine.entered_at + _STOP_WAIT_S + uploads_s
            case AttemptState.PREEMPTING | AttemptState.INTERRUPTING | AttemptState.GROWING:
                return self._machine.entered_at + self._termination.grace_s
        if self._ranks.starting:
            return self._started_at + config.start_timeout_s
        return self._progress.next_check()

    def _on_deadline(self) -> Ending:
        if self.state is AttemptState.RUNNING:
            self._delivery.flush()
            stopped = [] if self._ranks.starting else self._progress.stopped()
            never_began, limit = not self._progress.has_begun, self._progress.describe_limit()
            self._diagnosis.add_timeout(self._group, stopped, limit, never_began=never_began)
        self._machine.apply(Trigger.DEADLINE_PASSED)
        return self._end()

    def _collect_related_failures(self) -> None:
        """Process events from about the same time as a failure, so that a consequence is not mistaken for its cause."""
        losses = self._diagnosis.losses
        until = time.monotonic() + (0.0 if losses else _LOSS_WAIT_S)
        while self._ranks.active:
            remaining = until - time.monotonic()
            self._group.pump(self.handle, max(0.0, remaining))
            if remaining <= 0 or losses:
                return

    def describe_uncommitted(self) -> str:
        """Return a message about the checkpoints that were reported and are lost; empty if there are none."""
        return "" if self.state is AttemptState.SUCCEEDED else self._commits.describe_uncommitted()

    def _end(self) -> Ending:
        self._delivery.flush()
        ending = self._ending()
        if not isinstance(ending, AttemptFailed):
            return ending
        lost = self.describe_uncommitted()
        has_reported = any(self._ranks.reports(rank) for rank in range(len(self._ranks)))
        is_early = not has_reported and time.monotonic() - self._started_at < _EARLY_S
        failure = replace(ending.failure, is_early=is_early)
        return replace(ending, failure=failure, notes=(*ending.notes, lost) if lost else ending.notes)

    def _ending(self) -> Ending:
        match self.state:
            case AttemptState.SUCCEEDED:
                values = [self._unpickle(rank.return_value) for rank in self._ranks]
                return Succeeded(self._delivery.metrics, values)
            case AttemptState.PREEMPTED:
                return self._termination.preempted_ending()
            case AttemptState.GROWN:
                return self._termination.grown_ending()
            case _:
                return self._diagnosis.root_cause()

    def _unpickle(self, value: Any) -> Any:
        if not isinstance(value, Pickled):
            return value
        try:
            return pickle.loads(value.data)
        except Exception as error:  # the training itself succeeded, and its results are stored
            self._run.console.print(
                f"Result.return_value is None, because the driver cannot unpickle the value: {error!r}", error=True
            )
            return None
