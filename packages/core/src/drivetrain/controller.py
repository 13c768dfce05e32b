"""The state machine of a run: attempts, each a worker group whose events it takes, until one succeeds or none is left.

It knows no processes: a runtime gives it a group to pump events from, so tests drive it with a list of events.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import math
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.backend import Backend
from drivetrain.callback import Callbacks, Report
from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoints import CheckpointManager, CommittedCheckpoint
from drivetrain.context import Run, TrainContext, WorkerInfo
from drivetrain.errors import (
    CallbackError,
    CheckpointError,
    ConfigurationError,
    FailureKind,
    PluginError,
    ResourceError,
    WaitTimeoutError,
    WorkerDiedError,
)
from drivetrain.events import TRAINING, Event, Exited, Failed, PhaseEntered, Pickled, Reported, Returned, Uploaded
from drivetrain.failure import Failure, classify, describe_exit, rebuild_exception
from drivetrain.policy import FailurePolicy
from drivetrain.reports import MatchedReport, ReportMatcher, combine
from drivetrain.runtime.base import Group, GroupSpec, Runtime
from drivetrain.runtime.output import tail_log
from drivetrain.runtime.worker import TrainTask
from drivetrain.session import SessionOptions
from drivetrain.storage import Storage

__all__ = ["Controller", "Outcome", "RunFailed", "controller_failure"]

_SETTLE_S = 0.03
"""After an exception on one rank: how long a process's death, which would explain it, may take to be noticed."""

_STOP_WAIT_S = 10.0
"""After the stop condition is met: how long ranks may take to complete a checkpoint that some have reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run that succeeded leaves beside its directory."""

    metrics: dict[str, Any] | None
    return_value: Any


class RunFailed(Exception):
    """The last attempt failed.

    Attributes:
        failure: the root cause.
        notes: a line for each other rank that had failed or finished with it.
        history: the root causes of the attempts before.
    """

    def __init__(self, failure: Failure, notes: Sequence[str] = ()) -> None:
        super().__init__(failure.summary)
        self.failure = failure
        self.notes = tuple(notes)
        self.history: tuple[Failure, ...] = ()


class _Stop(BaseException):
    """The stop condition is met; raised through the runtime, and in-process through the train function."""


class Controller:
    """Drives one run.

    Args:
        run: the facts about it.
        runtime: starts its worker groups.
        backend: sets the framework up in them.
        function: the pickled pair of train function and config.
        storage: the run directory.
        checkpoints: its committed checkpoints.
        resume_from: what the first attempt continues from where the run has no checkpoint of its own.
        callbacks: the dispatcher.
        policy: decides about retries.
        metadata: the trainer's metadata, for the context.
        start: how many drivers have worked on the run, this one included.
        last_index: the highest report index that the run has used.
    """

    def __init__(
        self,
        *,
        run: Run,
        runtime: Runtime,
        backend: Backend,
        function: bytes,
        storage: Storage,
        checkpoints: CheckpointManager,
        resume_from: Checkpoint | None,
        callbacks: Callbacks,
        policy: FailurePolicy,
        metadata: Mapping[str, Any],
        start: int = 1,
        last_index: int = 0,
    ) -> None:
        self._run = run
        self._runtime = runtime
        self._backend = backend
        self._function = function
        self._storage = storage
        self._checkpoints = checkpoints
        self._initial_checkpoint = resume_from
        self._callbacks = callbacks
        self._policy = policy
        self._metadata = metadata
        self._number_of_start = start
        self._last_index = max(last_index, checkpoints.last_index)
        self._current: tuple[Group, _Attempt] | None = None

    def describe(self) -> str:
        """Where every rank is, with stacks; may be called from any thread."""
        current = self._current
        if current is None:
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                return f"no worker runs the train function now; the driver is at:\n{file.read().decode()}"
        group, attempt = current
        return attempt.diagnose(group)

    def run(self) -> Outcome:
        """Runs attempts until one succeeds.

        Raises:
            RunFailed: the policy gave up, or the failure is one that no retry can mend.
        """
        history: list[Failure] = []
        while True:
            try:
                return self._run_attempt(len(history))
            except RunFailed as failed:
                failed.history = tuple(history)
                retrying = _can_retry(failed.failure) and self._policy.decide(failed.failure, history)
                unheard = self._callbacks.close("on_failure", failed.failure, retrying)
                if unheard is not None:
                    failed.notes += (f"also: {unheard}",)
                if unheard is not None or not retrying:
                    raise
                if failed.failure.kind is FailureKind.HANG:
                    self._run.console.print(f"{self._run.name}: {failed.failure.exception}", error=True)
                history.append(failed.failure)
                self._last_index = max(self._last_index, self._checkpoints.sweep()[1])

    def _run_attempt(self, number: int) -> Outcome:
        try:
            with self._runtime.launch(self._group_spec()) as group:
                self._callbacks.call("on_group_start", number, list(group.workers))
                return self._drive(group, number)
        except (RunFailed, ConfigurationError, PluginError, ResourceError):
            raise
        except Exception as error:  # of a backend, a callback or the runtime
            raise RunFailed(controller_failure(error)) from None

    def _drive(self, group: Group, number: int) -> Outcome:
        """Has a group train, and closes what the attempt has opened; the first thing that went wrong is raised."""
        attempt: _Attempt | None = None
        ended_well = False
        try:
            attempt = self._start(group, number)
            self._current = group, attempt
            outcome = attempt.follow(group)
            ended_well = True
            return outcome
        finally:
            self._current = None
            if attempt is not None:
                self._last_index = attempt.last_index
            error: Exception | None = self._callbacks.close("on_group_stop", number)
            try:
                self._backend.close()
            except Exception as raised:  # whatever a plugin raises
                error = error or raised
            if error is not None:
                if ended_well:
                    raise error
                self._run.console.print(f"{self._run.name}: while ending the attempt: {error}", error=True)

    def _group_spec(self) -> GroupSpec:
        config = self._run.run_config
        count = max(1, self._run.scaling_config.num_workers)
        shown = {"rank0": frozenset((0,)), "all": frozenset(range(count)), "none": frozenset[int]()}
        return GroupSpec(
            num_workers=count,
            scaling=self._run.scaling_config,
            preload=self._backend.preload,
            warmup=self._backend.warmup,
            preload_environment=self._backend.preload_environment,
            log_directory=self._run.path / "logs" if config.log_to_file else None,
            shown_ranks=shown[config.worker_output],
            console=self._run.console,
            start_timeout_s=config.start_timeout_s,
        )

    def _start(self, group: Group, number: int) -> _Attempt:
        rendezvous = self._backend.rendezvous(group)
        self._probe_storage(group)
        latest = self._checkpoints.verify()
        checkpoint = self._checkpoints.checkpoint(latest) if latest else self._initial_checkpoint
        if number > 0 or self._number_of_start > 1:
            self._callbacks.call("on_resume", latest.iteration if latest else 0)
        world_size = len(group.workers)
        config = self._run.run_config
        options = SessionOptions(
            checkpoints=config.checkpoint_config,
            sync=config.sync_config,
            start=self._number_of_start,
            chdir=config.chdir_to_trial_dir,
        )
        attempt = _Attempt(
            run=self._run,
            workers=group.workers,
            storage=self._storage,
            checkpoints=self._checkpoints,
            callbacks=self._callbacks,
            first_index=self._last_index,
            first_iteration=latest.iteration if latest else 0,
            started=time.monotonic(),
        )
        group.train(
            [
                TrainTask(
                    function=self._function,
                    backend=self._backend,
                    rendezvous=rendezvous[worker.rank],
                    context=TrainContext(
                        worker=worker,
                        world_size=world_size,
                        local_world_size=sum(other.node_id == worker.node_id for other in group.workers),
                        experiment_name=self._run.name,
                        trial_id=self._run.id,
                        storage=self._storage,
                        attempt=number,
                        metadata=self._metadata,
                        trial_resources=self._run.scaling_config.total_resources,
                    ),
                    checkpoint=checkpoint,
                    first_index=self._last_index,
                    options=options,
                )
                for worker in group.workers
            ]
        )
        return attempt

    def _probe_storage(self, group: Group) -> None:
        """Says at the start, and not hours later, that a node cannot reach the run directory."""
        if len({worker.node_id for worker in group.workers}) == 1:
            return
        errors = group.run(_find_run, self._storage, self._run.id, self._number_of_start)
        told: set[str] = set()
        for worker, error in zip(group.workers, errors, strict=True):
            if error is not None and worker.node_id not in told:
                told.add(worker.node_id)
                self._run.console.print(
                    f"{self._run.name}: a checkpoint reported on {worker.hostname} will be refused: {error}", error=True
                )


def _find_run(storage: Storage, run_id: str, start: int) -> str | None:
    try:
        storage.require_run(run_id, start)
    except Exception as error:  # whatever a filesystem's library raises
        return str(error)
    return None


class _Attempt:
    """What is known of one attempt's ranks while their events come in."""

    def __init__(
        self,
        *,
        run: Run,
        workers: Sequence[WorkerInfo],
        storage: Storage,
        checkpoints: CheckpointManager,
        callbacks: Callbacks,
        first_index: int,
        first_iteration: int,
        started: float,
    ) -> None:
        self._run = run
        self._workers = workers
        self._storage = storage
        self._checkpoints = checkpoints
        self._callbacks = callbacks
        self._first_index = first_index
        self._first_iteration = first_iteration
        self._deadline = started + run.run_config.start_timeout_s
        self._detailed = run.run_config.detailed_metrics
        self._matcher = ReportMatcher(len(workers))
        self._phase = ["waiting to start"] * len(workers)
        self._starting = {worker.rank for worker in workers}
        self._running = {worker.rank for worker in workers}
        self._progress_at = started
        self._reports = [0] * len(workers)
        self._reported_at = [0.0] * len(workers)
        self._trained_from = [0.0] * len(workers)
        self._failures: list[Failure] = []
        self._exits: list[Failure] = []
        self._waiting_reports: deque[Reported] = deque()
        self._combined: dict[int, dict[str, float]] = {}
        self._uploading: dict[int, MatchedReport] = {}
        self._stop_by: float | None = None
        self._stop_number = 0
        self._return_value: Any = None
        self.last_index = first_index
        self.metrics: dict[str, Any] | None = None

    def follow(self, group: Group) -> Outcome:
        """Takes events until every rank has finished, or one has failed.

        Raises:
            RunFailed: a rank failed, or the ranks did not start within their time.
        """
        try:
            while self._running and not self._failures and not self._exits:
                group.pump(self.handle, self._patience(group))
        except _Stop:
            return self._outcome()
        if self._failures or self._exits:
            self._settle(group)
            self._flush_reports(everything=True)
            raise RunFailed(*self._root_cause())
        return self._outcome()

    def handle(self, event: Event) -> None:
        """Takes one event."""
        self._progress_at = time.monotonic()
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
        else:
            self._on_exit(event)
        if self._stop_by is not None and not self._matcher.holds(self._stop_number) and not self._uploading:
            raise _Stop

    def _on_report(self, event: Reported) -> None:
        rank = event.rank
        self._reports[rank] = event.number
        self.last_index = max(self.last_index, self._first_index + event.number)
        self._fill_in(event)
        settled = self._matcher.add(event)
        if rank == 0:
            if event.reduce or self._waiting_reports:
                self._waiting_reports.append(event)
            else:
                self._deliver(event)
        else:
            self._deliver(event)
        for matched in settled:
            self._complete(matched)

    def _fill_in(self, event: Reported) -> None:
        """Adds the metrics that every report has."""
        rank, metrics = event.rank, event.metrics
        metrics.setdefault("_timestamp", int(event.time))
        metrics.setdefault("_time_this_iter_s", event.time - self._reported_at[rank])
        metrics.setdefault("_training_iteration", self._first_iteration + event.number)
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
        self._callbacks.report(Report(event.rank, self._first_iteration + event.number, metrics))
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
            index=self._first_index + matched.number,
            iteration=self._first_iteration + matched.number,
            files=matched.files,
            metrics=metrics,
            name=names[0],
        )
        self._callbacks.call("on_checkpoint", entry)

    def _flush_reports(self, *, everything: bool = False) -> None:
        """Delivers rank 0's reports in order, up to the first whose combined values are not known yet."""
        waiting = self._waiting_reports
        while waiting and (everything or not waiting[0].reduce or waiting[0].number in self._combined):
            event = waiting.popleft()
            event.metrics.update(self._combined.pop(event.number, {}))
            self._deliver(event)

    def _on_phase(self, event: PhaseEntered) -> None:
        self._phase[event.rank] = event.phase
        if event.phase == TRAINING:
            self._starting.discard(event.rank)
            self._reported_at[event.rank] = self._trained_from[event.rank] = event.time

    def _on_return(self, event: Returned) -> None:
        self._finish(event.rank)
        self._phase[event.rank] = "finished"
        if event.rank == 0:
            self._return_value = event.value

    def _finish(self, rank: int) -> None:
        self._running.discard(rank)
        self._starting.discard(rank)
        for matched in self._matcher.finish(rank):
            self._complete(matched)

    def _on_failure(self, event: Failed) -> None:
        self._running.discard(event.rank)
        error = rebuild_exception(event.error)
        self._phase[event.rank] = "failed"
        self._failures.append(
            Failure(
                kind=classify(error),
                rank=event.rank,
                phase=event.phase,
                time=event.time,
                exception=error,
                summary=f"rank {event.rank} failed while {event.phase}: {_one_line(error)}",
            )
        )

    def _on_exit(self, event: Exited) -> None:
        if event.rank not in self._running:
            return
        self._running.discard(event.rank)
        how = event.reason or describe_exit(event.exit_code)
        summary = f"the worker process of rank {event.rank} {how} while {self._phase[event.rank]}"
        if event.exit_code == 0:
            summary += ", before its train function returned (os._exit?)"
        self._exits.append(
            Failure(
                kind=event.kind,
                rank=event.rank,
                phase=self._phase[event.rank],
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
                raise _Stop
            return remaining
        config = self._run.run_config
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
        raise WaitTimeoutError(f"{found}\n\n{self.diagnose(group, ranks)}", ranks=ranks)

    def diagnose(self, group: Group, ranks: Sequence[int] | None = None) -> str:
        """Where ranks are, in words: phase, reports, and stacks. May be called from any thread.

        Args:
            group: theirs.
            ranks: which; None for all that have not finished.
        """
        chosen = sorted(self._running) if ranks is None else ranks
        stacks = group.stacks(chosen)
        parts = [f"rank {rank} {self._whereabouts(rank)}:\n{stacks.get(rank, '  no answer')}" for rank in chosen]
        reports = {rank: self._reports[rank] for rank in chosen}
        if len(set(reports.values())) > 1:
            counts = ", ".join(f"{count} of rank {rank}" for rank, count in reports.items())
            parts.insert(0, f"The ranks do not agree on how often they have reported: {counts}.")
        if finished := [rank for rank, phase in enumerate(self._phase) if phase == "finished"]:
            parts.append(f"finished already: ranks {finished}")
        return "\n\n".join(parts)

    def _whereabouts(self, rank: int) -> str:
        worker = self._workers[rank]
        where = f"(process {worker.pid} on {worker.hostname}) is {self._phase[rank]}"
        if not self._reports[rank]:
            return f"{where}, has not reported yet, and is at"
        ago = max(0.0, time.time() - self._reported_at[rank])  # by the clock of its node
        return f"{where}, made report {self._reports[rank]} {ago:.1f} s ago, and is at"

    def _settle(self, group: Group) -> None:
        """Takes what else happens at the same moment, so that the cause is not taken for its consequence."""
        until = time.monotonic() + (_SETTLE_S if not self._exits else 0.0)
        with contextlib.suppress(_Stop):
            while self._running:
                remaining = until - time.monotonic()
                group.pump(self.handle, max(0.0, remaining))
                if remaining <= 0 or self._exits:
                    return

    def _root_cause(self) -> tuple[Failure, list[str]]:
        """The earliest failure; a process's death before an exception, which it is known to bring about elsewhere."""
        ordered = self._exits + sorted(self._failures, key=lambda failure: failure.time)
        notes = [f"also: {failure.summary}" for failure in ordered[1:]]
        finished = [rank for rank, phase in enumerate(self._phase) if phase == "finished"]
        if finished:
            notes.append(f"ranks that had finished already: {', '.join(map(str, finished))}")
        return ordered[0], notes

    def _outcome(self) -> Outcome:
        self._flush_reports(everything=True)
        value = self._return_value
        if isinstance(value, Pickled):
            try:
                value = pickle.loads(value.data)
            except Exception as error:  # the training itself succeeded, and its results are on storage
                self._run.console.print(
                    f"the train function's value cannot be unpickled here, so Result.return_value is None: {error!r}",
                    error=True,
                )
                value = None
        return Outcome(metrics=self.metrics, return_value=value)


def controller_failure(error: Exception) -> Failure:
    """The failure that an exception on the controller's side amounts to."""
    if isinstance(error, CallbackError):
        return Failure(kind=FailureKind.USER_ERROR, summary=str(error), exception=error.__cause__ or error)
    kind = classify(error)
    if isinstance(error, WaitTimeoutError):
        kind = FailureKind.HANG
    elif isinstance(error, WorkerDiedError):
        kind = FailureKind.INFRASTRUCTURE
    return Failure(kind=kind, summary=_one_line(error), exception=error)


def _can_retry(failure: Failure) -> bool:
    """Failures of the controller's own making, such as a callback's, would only come again."""
    return failure.rank is not None or failure.kind in (FailureKind.INFRASTRUCTURE, FailureKind.HANG)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
