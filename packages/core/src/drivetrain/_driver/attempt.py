"""One attempt of a run: what is known of its ranks while their events come in, and how it ends."""

from __future__ import annotations

import contextlib
import datetime
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from drivetrain._base.failure import Failure, classify, describe_exit, rebuild_exception
from drivetrain._base.interrupts import Interrupts
from drivetrain._driver.outcomes import Outcome, Resize, RunFailed, Stop, one_line
from drivetrain._driver.reports import MatchedReport, ReportMatcher, combine
from drivetrain._hooks.callback import Callbacks, Report
from drivetrain._hooks.context import Run, WorkerInfo
from drivetrain._hooks.policy import target_size
from drivetrain._runtimes.base import Group
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._wire.commands import CountSteps, Renumber, StopAfter
from drivetrain._wire.events import (
    Event,
    Exited,
    Failed,
    PhaseEntered,
    Pickled,
    PreemptionInfo,
    RankState,
    Renumbered,
    Reported,
    ReportNumber,
    Returned,
    SigtermReceived,
    StepsCounted,
    Uploaded,
)
from drivetrain._worker.output import tail_log
from drivetrain._worker.stacks import NO_ANSWER
from drivetrain.errors import CallbackError, CheckpointError, FailureKind, WaitTimeoutError, WorkerDiedError

__all__ = ["Attempt"]

_SETTLE_S = 0.03
"""After an exception on one rank: how long a process's death, which would explain it, may take to be noticed."""

_RENUMBER_WAIT_S = 10.0
"""A rank answers from a thread of its own, so it takes longer only if its process is stopped."""

_STOP_WAIT_S = 10.0
"""After the stop condition is met: how long ranks may take to complete a checkpoint that some have reported."""


class Attempt:
    """What is known of one attempt's ranks while their events come in."""

    def __init__(
        self,
        *,
        run: Run,
        workers: Sequence[WorkerInfo],
        storage: Storage,
        checkpoints: CheckpointManager,
        callbacks: Callbacks,
        interrupts: Interrupts,
        room: Callable[[], int],
        last_report: ReportNumber,
        backend: str,
        started: float,
    ) -> None:
        self._run = run
        self._workers = workers
        self._storage = storage
        self._checkpoints = checkpoints
        self._callbacks = callbacks
        self._interrupts = interrupts
        self._room = room
        self._looked_at = started
        self._grown: int | None = None
        self._group: Group | None = None
        self._notice: PreemptionInfo | None = None
        self._end_by = 0.0
        self._counts: dict[int, int] = {}
        self._noticed: set[int] = set()
        self._preempted = False
        self._backend = backend
        self._before = last_report
        self._deadline = started + run.run_config.start_timeout_s
        self._detailed = run.run_config.detailed_metrics
        self._matcher = ReportMatcher(len(workers), last_report.number)
        self._phase = [RankState.WAITING] * len(workers)
        self._starting = {worker.rank for worker in workers}
        self._running = {worker.rank for worker in workers}
        self._progress_at = started
        self._latest = [last_report] * len(workers)
        self._reported_at = [0.0] * len(workers)
        self._trained_from = [0.0] * len(workers)
        self._clock_lags: dict[str, float] = {}  # node -> at most so many seconds is its clock behind
        self._failures: list[Failure] = []
        self._exits: list[Failure] = []
        self._to_renumber: set[int] = set()
        self._waiting_reports: deque[Reported] = deque()
        self._combined: dict[int, dict[str, float]] = {}
        self._uploading: dict[int, MatchedReport] = {}
        self._stop_by: float | None = None
        self._stop_number = 0
        self._return_values: list[Any] = [None] * len(workers)
        self.last_number = last_report.number
        self.metrics: dict[str, Any] | None = None

    def follow(self, group: Group) -> Outcome:
        """Takes events until every rank has finished, or one has failed.

        Raises:
            RunFailed: a rank failed, or the ranks did not start within their time, or have ended for a preemption.
        """
        self._group = group
        try:
            while self._running and not self._failures and not self._exits:
                group.pump(self.handle, self._patience(group))
        except Stop:
            return self._outcome()
        if self._failures or self._exits:
            self._settle(group)
            self._flush_reports(everything=True)
            raise RunFailed(*self._root_cause())
        if self._preempted:
            self._flush_reports(everything=True)
            if self._grown is not None:
                raise Resize(self._grown)
            raise self._preemption("the ranks have ended after the same step")
        return self._outcome()

    @property
    def lost(self) -> list[int]:
        """The ranks that new processes could replace: they are gone, and all others are in the train function."""
        ranks = [failure.rank for failure in self._exits if failure.rank is not None]
        return ranks if self._running and self._are_fine(len(ranks)) else []

    def await_rejoin(self, group: Group, future: Future[Any]) -> bool:
        """After a loss: waits until the other ranks wait for new ones; False if one of them does not come to it."""
        lost = len(self._exits)
        deadline = time.monotonic() + self._run.run_config.start_timeout_s
        with group.woken_by(future):
            self._settled_on(group, future.done, lost, deadline)
        return future.done() and not future.cancelled() and self._are_fine(lost)

    def renumber(self, group: Group) -> ReportNumber | None:
        """Makes the next report of each rank follow the same number; None if a rank fails.

        Returns:
            An unused number: a lost rank may already have stored files under the latest one.
        """
        last, lost, deadline = ReportNumber(0, 0), len(self._exits), time.monotonic() + _RENUMBER_WAIT_S
        while last.number <= max(self._latest).number:  # an answer comes after the reports that were sent before it
            last = ReportNumber(max(self._latest).number + 1, max(latest.iteration for latest in self._latest))
            self._to_renumber = set(self._running)
            group.send(sorted(self._running), Renumber(last))
            self._settled_on(group, lambda: not self._to_renumber, lost, deadline)
            if self._to_renumber or not self._are_fine(lost):
                return None
        return last

    def go_on(self, workers: Sequence[WorkerInfo], last: ReportNumber) -> None:
        """New processes have taken the places of the lost ranks; what was to be completed by those never will be."""
        lost = self.lost
        assert lost
        self._flush_reports(everything=True)
        self._matcher.restart(last.number)
        self._uploading = {n: held for n, held in self._uploading.items() if held.uploading.isdisjoint(lost)}
        self._combined.clear()
        self._exits.clear()
        self._workers = workers
        self._latest = [last] * len(workers)
        self._progress_at = time.monotonic()
        self._deadline = self._progress_at + self._run.run_config.start_timeout_s
        for rank in lost:
            self._phase[rank] = RankState.WAITING
            self._running.add(rank)
            self._starting.add(rank)
            self._noticed.discard(rank)

    def _are_fine(self, lost: int) -> bool:
        """Nothing but that many losses has happened, and all others are in the train function and to stay there."""
        ending = self._failures or self._notice or self._grown or self._stop_by
        return not ending and len(self._exits) == lost and set(self._phase) == {RankState.TRAINING}

    def _settled_on(self, group: Group, met: Callable[[], bool], lost: int, deadline: float) -> None:
        while not met() and self._are_fine(lost) and (remaining := deadline - time.monotonic()) > 0:
            group.pump(self.handle, remaining)

    def handle(self, event: Event) -> None:
        """Takes one event."""
        self._progress_at = time.monotonic()
        self._compare_clocks(event)
        if isinstance(event, Reported):
            self._on_report(event)
        elif isinstance(event, Uploaded):
            self._on_upload(event)
        elif isinstance(event, PhaseEntered):
            self._on_phase(event)
        elif isinstance(event, Returned):
            self._on_return(event)
        elif isinstance(event, Failed):
            self._on_failure(event)
        elif isinstance(event, Exited):
            self._on_exit(event)
        elif isinstance(event, Renumbered):
            self._to_renumber.discard(event.rank)
        elif isinstance(event, StepsCounted):
            self._counts[event.rank] = event.steps
            self._name_step()
        elif isinstance(event, SigtermReceived):
            self._noticed.add(event.rank)
            if event.graceful:
                self.give_notice(f"the process of rank {event.rank} was asked to end (SIGTERM)")
        else:
            self._interrupts.on_notice = self.give_notice
        self._progress_at = time.monotonic()  # again: what callbacks take is no silence of the ranks
        if self._grown is not None and self._notice is None:
            raise Resize(self._grown)
        if self._stop_by is not None and not self._matcher.holds(self._stop_number) and not self._uploading:
            raise Stop

    def give_notice(self, reason: str) -> None:
        """Has the ranks end after the same step; see :mod:`drivetrain._worker.preemption`."""
        if self._notice is not None or self._group is None:
            return
        grace_s = self._run.run_config.failure_config.preemption_grace_s
        self._notice = PreemptionInfo(reason, time.time() + grace_s)
        self._end_by = time.monotonic() + grace_s
        self._run.console.print(
            f"{self._run.name}: {reason}: the ranks are to save and end after the same step, within {grace_s:g} s",
            error=True,
        )
        self._group.send(sorted(self._running), CountSteps())

    def _name_step(self) -> None:
        """Once every rank that runs has counted its questions: the step after the furthest is the last."""
        if self._notice is None or self._group is None or not self._counts or self._running - self._counts.keys():
            return
        step = max(self._counts.values()) + 1
        self._counts.clear()
        self._group.send(sorted(self._running), StopAfter(step, self._notice))

    def _preemption(self, how: str) -> RunFailed:
        assert self._notice is not None
        summary = f"preempted: {self._notice.reason}; {how}"
        return RunFailed(Failure(kind=FailureKind.PREEMPTION, summary=summary))

    def _compare_clocks(self, event: Event) -> None:
        """Learns how far a node's clock is off: the message that took the shortest time says it best."""
        if isinstance(event, (Reported, PhaseEntered, Failed)):
            node, lag = self._workers[event.rank].node_id, time.time() - event.time
            self._clock_lags[node] = min(lag, self._clock_lags.get(node, lag))

    def _on_report(self, event: Reported) -> None:
        rank = event.rank
        self._latest[rank] = ReportNumber(event.number, event.iteration)
        self.last_number = max(self.last_number, event.number)
        self._fill_in(event)
        settled = self._matcher.add(event)
        if rank == 0 and not event.quiet and (event.reduce or self._waiting_reports):
            self._waiting_reports.append(event)
        elif not event.quiet:
            self._deliver(event)
        for matched in settled:
            self._complete(matched)

    def _fill_in(self, event: Reported) -> None:
        """Adds the metrics that every report has."""
        rank, metrics = event.rank, event.metrics
        metrics.setdefault("_timestamp", int(event.time))
        if not event.quiet:
            metrics.setdefault("_time_this_iter_s", event.time - self._reported_at[rank])
        metrics.setdefault("_training_iteration", event.iteration)
        if event.quiet:
            return
        self._reported_at[rank] = event.time
        if self._detailed:
            worker = self._workers[rank]
            moment = datetime.datetime.fromtimestamp(event.time)
            metrics.setdefault("_date", moment.strftime("%Y-%m-%d_%H-%M-%S"))
            metrics.setdefault("_hostname", worker.hostname)
            metrics.setdefault("_node_ip", worker.ip)
            metrics.setdefault("_pid", worker.pid)
            metrics.setdefault("_time_total_s", event.time - self._trained_from[rank])

    def _deliver(self, event: Reported) -> None:
        metrics = event.metrics
        if event.rank == 0:
            self.metrics = metrics
        self._callbacks.report(Report(event.rank, event.iteration, metrics, event.directory))
        if event.rank == 0 and self._run.run_config.stop is not None and self._stop_by is None and self._met(metrics):
            self._stop_by = time.monotonic() + _STOP_WAIT_S
            self._stop_number = event.number

    def _met(self, metrics: Mapping[str, Any]) -> bool:
        condition = self._run.run_config.stop
        try:
            if callable(condition):
                return bool(condition(self._run.id, metrics))
            return any(metrics.get(key, -math.inf) >= bound for key, bound in (condition or {}).items())
        except Exception as error:  # whatever a user's function, or comparing a metric that is no number, raises
            raise CallbackError(f"RunConfig(stop=...) raised {type(error).__name__}: {error}") from error

    def _complete(self, matched: MatchedReport) -> None:
        """No rank can add to this report any more: combine its values, then commit its checkpoint."""
        if matched.reduce:
            self._combined[matched.number] = combine(matched.metrics, matched.reduce)
        self._flush_reports()
        if matched.uploading:
            self._uploading[matched.number] = matched
        elif matched.directories:
            self._commit(matched)

    def _on_upload(self, event: Uploaded) -> None:
        matched = self._matcher.held(event.number) or self._uploading.get(event.number)
        if matched is None:  # of a rank that was not waited for, and its report has not been settled
            return
        matched.files[event.rank] = event.files
        matched.uploading.discard(event.rank)
        if not matched.uploading and event.number in self._uploading:
            self._commit(self._uploading.pop(event.number))

    def _commit(self, matched: MatchedReport) -> None:
        names = sorted(set(matched.directories.values()))
        if len(names) > 1:
            raise CheckpointError(
                f"the ranks want to name the directory of a checkpoint the same, found {', '.join(names)}"
            )
        metrics = dict(matched.metrics[min(matched.metrics)])
        metrics.update(combine(matched.metrics, matched.reduce))
        entry: CommittedCheckpoint = self._checkpoints.commit(
            index=matched.number,
            iteration=matched.iteration,
            files=matched.files,
            metrics=metrics,
            name=names[0],
        )
        self._callbacks.call("on_checkpoint", entry)
        self._look_for_room()

    def _look_for_room(self) -> None:
        """Has an elastic run grow, now and then."""
        scaling, size = self._run.scaling_config, len(self._workers)
        if size >= scaling.max_workers or self._notice is not None:
            return
        if time.monotonic() - self._looked_at < scaling.elastic_resize_monitor_interval_s:
            return
        self._looked_at = time.monotonic()
        if (target := target_size(scaling, self._room())) > size and self._running:
            self._grown = target
            if self._interrupts.on_notice is not None:  # it can save where it is
                self.give_notice(f"there is room for {target} workers")

    def _flush_reports(self, *, everything: bool = False) -> None:
        """Delivers rank 0's reports in order, up to the first whose combined values are not known yet."""
        waiting = self._waiting_reports
        while waiting and (everything or not waiting[0].reduce or waiting[0].number in self._combined):
            event = waiting.popleft()
            event.metrics.update(self._combined.pop(event.number, {}))
            self._deliver(event)

    def _on_phase(self, event: PhaseEntered) -> None:
        self._phase[event.rank] = event.state
        if event.state is RankState.TRAINING:
            self._starting.discard(event.rank)
            self._reported_at[event.rank] = self._trained_from[event.rank] = event.time

    def _on_return(self, event: Returned) -> None:
        self._preempted |= event.preempted
        self._finish(event.rank)
        self._phase[event.rank] = RankState.FINISHED
        self._return_values[event.rank] = event.value

    def _finish(self, rank: int) -> None:
        self._running.discard(rank)
        self._starting.discard(rank)
        for matched in self._matcher.finish(rank):
            self._complete(matched)
        self._name_step()

    def _on_failure(self, event: Failed) -> None:
        self._running.discard(event.rank)
        error = rebuild_exception(event.error)
        self._phase[event.rank] = RankState.FAILED
        self._failures.append(
            Failure(
                kind=classify(error),
                rank=event.rank,
                phase=event.state.describe(self._backend),
                time=event.time,
                exception=error,
                summary=f"rank {event.rank} failed while {event.state.describe(self._backend)}: {one_line(error)}",
            )
        )

    def _on_exit(self, event: Exited) -> None:
        if event.rank not in self._running:
            return
        self._running.discard(event.rank)
        kind, how = event.kind, event.reason or describe_exit(event.exit_code)
        if event.rank in self._noticed:
            kind, how = FailureKind.PREEMPTION, "was asked to end (SIGTERM)"
        phase = self._phase[event.rank].describe(self._backend)
        summary = f"the worker process of rank {event.rank} {how} while {phase}"
        if event.exit_code == 0:
            summary += ", before its train function returned (os._exit?)"
        self._exits.append(
            Failure(
                kind=kind,
                rank=event.rank,
                phase=phase,
                node_id=self._workers[event.rank].node_id,
                exception=WorkerDiedError(summary, rank=event.rank, exit_code=event.exit_code),
                summary=summary,
                log_tail=tail_log(self._run.path / "logs" if self._run.run_config.log_to_file else None, event.rank),
            )
        )

    def _patience(self, group: Group) -> float | None:
        """Seconds to wait for the next event; raises when a bounded wait is over."""
        if self._stop_by is not None:
            patience = self._run.run_config.sync_config.sync_timeout if self._uploading else 0.0
            remaining = self._stop_by + patience - time.monotonic()
            if remaining <= 0:
                raise Stop
            return remaining
        config = self._run.run_config
        if self._notice is not None:
            remaining = self._end_by - time.monotonic()
            if remaining > 0:
                return remaining
            raise self._preemption(
                f"ranks {sorted(self._running)} have not ended within {config.failure_config.preemption_grace_s:g} s "
                "(FailureConfig.preemption_grace_s)"
            )
        if self._starting:
            deadline, ranks = self._deadline, sorted(self._starting)
            found = (
                f"waited {config.start_timeout_s:g} s (RunConfig.start_timeout_s) for ranks {ranks} to reach the train "
                "function"
            )
        elif config.hang_timeout_s is not None:
            deadline, ranks = self._progress_at + config.hang_timeout_s, sorted(self._running)
            found = (
                f"waited {config.hang_timeout_s:g} s (RunConfig.hang_timeout_s) for a report of any of ranks {ranks}"
            )
        else:
            return None  # the user's own code may take its time
        remaining = deadline - time.monotonic()
        if remaining > 0:
            return remaining
        stacks = group.stacks(ranks)
        raise WaitTimeoutError(f"{found}{self._suspect(ranks, stacks)}\n\n{self._explain(ranks, stacks)}", ranks=ranks)

    def diagnose(self, group: Group, ranks: Sequence[int] | None = None) -> str:
        """Where ranks are, in words: phase, reports, and stacks. May be called from any thread.

        Args:
            group: theirs.
            ranks: which; None for all that have not finished.
        """
        chosen = sorted(self._running) if ranks is None else ranks
        return self._explain(chosen, group.stacks(chosen))

    def _explain(self, ranks: Sequence[int], stacks: Mapping[int, str]) -> str:
        parts = [f"rank {rank} {self._whereabouts(rank)}:\n{stacks.get(rank, NO_ANSWER)}" for rank in ranks]
        reports = {rank: self._count(rank) for rank in ranks}
        if len(set(reports.values())) > 1:
            counts = ", ".join(f"{count} of rank {rank}" for rank, count in reports.items())
            parts.insert(0, f"The ranks do not agree on how often they have reported: {counts}.")
        if finished := [rank for rank, phase in enumerate(self._phase) if phase is RankState.FINISHED]:
            parts.append(f"finished already: ranks {finished}")
        return "\n\n".join(parts)

    def _suspect(self, ranks: Sequence[int], stacks: Mapping[int, str]) -> str:
        """Which ranks the others may be waiting for: those that give no answer, or else those that are behind."""
        answers = {rank: stacks.get(rank, NO_ANSWER) for rank in ranks}
        silent = [f"; rank {rank}: {said.strip()}" for rank, said in answers.items() if said.startswith(NO_ANSWER)]
        counts = [self._count(rank) for rank in ranks]
        behind = [rank for rank in ranks if self._count(rank) < max(counts)]
        return "".join(silent) or (f"; behind the others: {_named(behind)}" if behind else "")

    def _whereabouts(self, rank: int) -> str:
        worker = self._workers[rank]
        where = f"(process {worker.pid} on {worker.hostname}) is {self._phase[rank].describe(self._backend)}"
        if not self._count(rank):
            return f"{where}, has not reported yet, and is at"
        ago = max(0.0, time.time() - self._reported_at[rank])  # by the clock of its node
        return f"{where}, made report {self._count(rank)} {ago:.1f} s ago, and is at"

    def _count(self, rank: int) -> int:
        """How many reports a rank has made in this attempt."""
        return self._latest[rank].number - self._before.number

    def _settle(self, group: Group) -> None:
        """Takes what else happens at the same moment, so that the cause is not taken for its consequence."""
        until = time.monotonic() + (_SETTLE_S if not self._exits else 0.0)
        with contextlib.suppress(Stop):
            while self._running:
                remaining = until - time.monotonic()
                group.pump(self.handle, max(0.0, remaining))
                if remaining <= 0 or self._exits:
                    return

    def _root_cause(self) -> tuple[Failure, list[str]]:
        """The earliest failure; a process's death before an exception, which it is known to bring about elsewhere."""
        ordered = self._exits + sorted(self._failures, key=self._true_time)
        notes = [f"also: {failure.summary}" for failure in ordered[1:]]
        finished = [rank for rank, phase in enumerate(self._phase) if phase is RankState.FINISHED]
        if finished:
            notes.append(f"ranks that had finished already: {', '.join(map(str, finished))}")
        return ordered[0], notes

    def _true_time(self, failure: Failure) -> float:
        """When it happened, by the clock of the driver's node."""
        assert failure.rank is not None
        return failure.time + self._clock_lags[self._workers[failure.rank].node_id]

    def _outcome(self) -> Outcome:
        self._flush_reports(everything=True)
        return Outcome(metrics=self.metrics, return_values=[self._unpickle(value) for value in self._return_values])

    def _unpickle(self, value: Any) -> Any:
        if not isinstance(value, Pickled):
            return value
        try:
            return pickle.loads(value.data)
        except Exception as error:  # the training itself succeeded, and its results are on storage
            self._run.console.print(
                f"the train function's value cannot be unpickled here, so it is None: {error!r}", error=True
            )
            return None


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
