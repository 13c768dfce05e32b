"""Determines the root cause of a failed attempt, and describes what the ranks are doing, with their stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from drivetrain._base.failure import Failure, behind_exit, classify, describe_exit, one_line, rebuild_exception
from drivetrain._driver.outcomes import AttemptFailed
from drivetrain._driver.ranks import Ranks
from drivetrain._hooks.context import Run
from drivetrain._runtimes.base import Group
from drivetrain._runtimes.output import tail_log
from drivetrain._runtimes.stacks import NO_RESPONSE
from drivetrain._storage.layout import LOGS
from drivetrain._wire.events import Event, Exited, Failed, PhaseEntered, RankState, Reported
from drivetrain.errors import (
    BackendError,
    CallbackError,
    DrivetrainError,
    FailureKind,
    PluginBrokenError,
    WaitTimeoutError,
    WorkerDiedError,
)

__all__ = ["Diagnosis", "failure_in_driver"]

_HOW_TO_SHOW_PROGRESS = "If the training is healthy, call drivetrain.report() or drivetrain.heartbeat() in each step"

_REPORTS_PER_ESTIMATE = 16


class Diagnosis:
    """Collects the failures of one attempt's ranks, and describes what the ranks are doing.

    Args:
        run: the run.
        ranks: the ranks of the attempt.

    Attributes:
        losses: one failure for each lost process, in the order of detection.
    """

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run = run
        self._ranks = ranks
        self._clock_lags: dict[str, float] = {}
        self._exceptions: list[Failure] = []
        self._timeout: Failure | None = None
        self.losses: list[Failure] = []

    def update_clock_lag(self, event: Event) -> None:
        """Estimate by how many seconds the clock of a rank's node is behind the driver's clock.

        The difference between the driver's time and the time in an event also contains the delay of the message. The
        smallest difference is therefore the best estimate. Every sixteenth report suffices for it.
        """
        if type(event) is Reported and event.number % _REPORTS_PER_ESTIMATE:
            return
        if isinstance(event, (Reported, PhaseEntered, Failed)):
            node, lag = self._ranks[event.rank].worker.node_id, time.time() - event.time
            self._clock_lags[node] = min(lag, self._clock_lags.get(node, lag))

    def add_exception(self, event: Failed) -> None:
        """Record the exception that a rank raised."""
        error = rebuild_exception(event.error)
        phase = self._ranks.describe_state(event.state)
        # A script that calls sys.exit() has usually printed the reason.
        is_explained = not isinstance(error, SystemExit) or behind_exit(error) is not error
        self._exceptions.append(
            Failure(
                kind=event.kind or classify(error),
                rank=event.rank,
                phase=phase,
                time=event.time,
                exception=error,
                summary=f"rank {event.rank} failed while {phase}: {one_line(error)}",
                log_tail="" if is_explained or self._is_shown(event.rank) else self._tail_log(event.rank),
            )
        )

    def add_loss(self, event: Exited) -> None:
        """Record that a rank's process exited before its train function returned."""
        rank, phase = self._ranks[event.rank], self._ranks.describe(event.rank)
        kind, how = event.kind, event.reason or describe_exit(event.exit_code)
        if rank.received_sigterm:
            kind, how = FailureKind.PREEMPTION, "received SIGTERM"
        summary = f"[DT-501] rank {event.rank}: the worker process {how} while {phase}"
        if event.exit_code == 0:
            summary += ", before its train function returned (os._exit?)"
        self.losses.append(
            Failure(
                kind=kind,
                rank=event.rank,
                phase=phase,
                node_id=rank.worker.node_id,
                exception=WorkerDiedError(summary, rank=event.rank, exit_code=event.exit_code),
                summary=summary,
                log_tail=self._tail_log(event.rank),
            )
        )

    def _tail_log(self, rank: int) -> str:
        return tail_log(self._run.path / LOGS if self._run.run_config.log_to_file else None, rank)

    def _is_shown(self, rank: int) -> bool:
        shown = self._run.run_config.worker_output
        return shown == "all" or (shown == "rank0" and rank == 0)

    def root_cause(self) -> AttemptFailed:
        """Return the root cause: the timeout, else the first lost process, else the earliest exception.

        Lost processes come before exceptions, because the loss of a process may cause exceptions on other ranks.
        """
        if self._timeout is not None:
            return AttemptFailed(self._timeout)
        ordered = self.losses + sorted(self._exceptions, key=self._time_by_driver_clock)
        notes = [f"also: {failure.summary}" for failure in ordered[1:]]
        # A rank that tears down its connections can cause the exception before its return value arrives.
        if finished := self._ranks.in_state(RankState.TEARING_DOWN, RankState.FINISHED):
            notes.append(f"ranks that had already finished: {', '.join(map(str, finished))}")
        return AttemptFailed(ordered[0], tuple(notes), tuple(ordered))

    def add_timeout(self, group: Group, stopped: Sequence[int], limit: str, *, never_began: bool) -> None:
        """Record that ranks did not start in time, or that ranks have made no progress for too long.

        Args:
            group: the group of workers.
            stopped: the ranks without progress, the one that stopped first first; empty if ranks did not start.
            limit: a description of the time limit for progress.
            never_began: True if no rank has made progress in this attempt, so that it may not call what shows progress.
        """
        config = self._run.run_config
        if self._ranks.starting:
            ranks = sorted(self._ranks.starting)
            waited = (
                f"[DT-303] waited {config.start_timeout_s:g} s (RunConfig.start_timeout_s) for ranks {ranks} "
                "to reach the train function"
            )
        else:
            ranks = sorted(self._ranks.active)
            of_whom = f"any of ranks {ranks}"
            if len(stopped) < len(ranks):
                of_whom = f"{_rank_names(stopped)}, although other ranks make progress"
            waited = f"[DT-502] waited {limit} for a report or heartbeat from {of_whom}"
            if never_began:
                waited += ", which have sent none"
        stacks = group.stacks(ranks)
        hint = f". {_HOW_TO_SHOW_PROGRESS}" if never_began and not self._ranks.starting else ""
        message = f"{waited}{self._suspect(ranks, stacks)}{hint}\n\n{self._explain(ranks, stacks)}"
        self._timeout = failure_in_driver(WaitTimeoutError(message, ranks=ranks))

    def describe(self, group: Group) -> str:
        """Describe the active ranks: state, reports and stacks. May be called from any thread."""
        ranks = sorted(self._ranks.active)
        return self._explain(ranks, group.stacks(ranks))

    def _explain(self, ranks: Sequence[int], stacks: Mapping[int, str]) -> str:
        parts = [f"rank {rank} {self._activity(rank)}:\n{stacks.get(rank, NO_RESPONSE)}" for rank in ranks]
        reports = {rank: self._ranks.reports(rank) for rank in ranks}
        if len(set(reports.values())) > 1:
            counts = ", ".join(f"{count} by rank {rank}" for rank, count in reports.items())
            parts.insert(0, f"The ranks have made different numbers of reports: {counts}.")
        if finished := self._ranks.in_state(RankState.FINISHED):
            parts.append(f"already finished: ranks {finished}")
        return "\n\n".join(parts)

    def _suspect(self, ranks: Sequence[int], stacks: Mapping[int, str]) -> str:
        """Name the ranks that others may be waiting for: ranks without a response, or else ranks with fewer reports."""
        responses = {rank: stacks.get(rank, NO_RESPONSE) for rank in ranks}
        silent = [f"; rank {rank}: {text.strip()}" for rank, text in responses.items() if text.startswith(NO_RESPONSE)]
        counts = [self._ranks.reports(rank) for rank in ranks]
        behind = [rank for rank in ranks if self._ranks.reports(rank) < max(counts)]
        return "".join(silent) or (f"; behind the others: {_rank_names(behind)}" if behind else "")

    def _activity(self, rank: int) -> str:
        worker, reports = self._ranks[rank].worker, self._ranks.reports(rank)
        where = f"(process {worker.pid} on {worker.hostname}) is {self._ranks.describe(rank)}"
        if not reports or not self._ranks[rank].reported_at:  # a new process inherits the number of the lost one
            return f"{where}, has not reported yet; stack"
        ago = max(0.0, time.time() - self._ranks[rank].reported_at)  # reported_at is by the clock of the rank's node
        return f"{where}, made report {reports} {ago:.1f} s ago; stack"

    def _time_by_driver_clock(self, failure: Failure) -> float:
        """Return the time of a failure, converted to the clock of the driver's node."""
        assert failure.rank is not None
        return failure.time + self._clock_lags[self._ranks[failure.rank].worker.node_id]


def failure_in_driver(error: Exception, source: str | None = None) -> Failure:
    """Return the failure for an exception that a callback, backend, runtime or storage raised in the driver.

    Args:
        error: the exception.
        source: what raised it, for the summary; None if the exception says so.
    """
    if isinstance(error, (BackendError, CallbackError, PluginBrokenError)):
        cause = error.__cause__ or error
        return Failure(kind=classify(cause), summary=str(error), exception=cause)
    kind = classify(error)
    if isinstance(error, WaitTimeoutError):
        kind = FailureKind.HANG
    elif isinstance(error, WorkerDiedError):
        kind = FailureKind.INFRASTRUCTURE
    summary = one_line(error)
    if source is not None and not isinstance(error, DrivetrainError):
        summary = f"{source}: {summary}"
    return Failure(kind=kind, summary=summary, exception=error)


def _rank_names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
