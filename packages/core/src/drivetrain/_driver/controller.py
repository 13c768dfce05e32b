"""The state machine of a run: attempts, each a worker group whose events it takes, until one succeeds or none is left.

It knows no processes: a runtime gives it a group to pump events from, so tests drive it with a list of events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain._base.console import Console
from drivetrain._base.failure import Failure, classify
from drivetrain._base.interrupts import Interrupts
from drivetrain._driver.attempt import Attempt
from drivetrain._driver.outcomes import Outcome, Resize, RunFailed, one_line
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.callback import Callbacks
from drivetrain._hooks.context import Run, TrainContext, WorkerInfo
from drivetrain._hooks.policy import FailurePolicy, avoided_nodes, target_size
from drivetrain._runtimes.base import Group, GroupSpec, Runtime
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._wire.events import ReportNumber
from drivetrain._wire.task import SessionOptions, TrainTask
from drivetrain._worker.stacks import own_stacks
from drivetrain.config import RunConfig, ScalingConfig
from drivetrain.errors import (
    CallbackError,
    ConfigurationError,
    FailureKind,
    PluginError,
    ResourceError,
    RunCancelledError,
    RunInUseError,
    WaitTimeoutError,
    WorkerDiedError,
)

__all__ = ["Controller", "controller_failure", "group_spec"]

_RETRIED = (FailureKind.INFRASTRUCTURE, FailureKind.HANG, FailureKind.PREEMPTION, FailureKind.STORAGE)
"""What may go well the next time though it was no rank's failure: a disk gets room, a network comes back."""


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
        interrupts: what ends the run from outside.
        shards: splits the datasets among workers, which may continue from a checkpoint.
        start: how many drivers have worked on the run, this one included.
        last_number: the highest report number that the run has used.
        all_values: every rank's value is wanted, and not only rank 0's.
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
        interrupts: Interrupts,
        shards: Callable[[Sequence[WorkerInfo], Checkpoint | None], Sequence[Mapping[str, Any]]],
        start: int = 1,
        last_number: int = 0,
        all_values: bool = False,
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
        self._interrupts = interrupts
        self._shards = shards
        self._held_shards: Sequence[Mapping[str, Any]] = ()
        self._number_of_start = start
        self._all_values = all_values
        self._last_number = max(last_number, checkpoints.last_index)
        self._current: tuple[Group, Attempt] | None = None
        self._history: list[Failure] = []
        self._run_resources = contextlib.ExitStack()
        self._elastic = run.scaling_config.min_workers < run.scaling_config.max_workers

    def describe(self) -> str:
        """Where every rank is, with stacks; may be called from any thread."""
        current = self._current
        if current is None:
            return f"no worker runs the train function now; the driver is at:\n{own_stacks()}"
        group, attempt = current
        return attempt.diagnose(group)

    def run(self) -> Outcome:
        """Runs attempts until one succeeds.

        Raises:
            RunFailed: the policy gave up, or the failure is one that no retry can mend.
        """
        with self._run_resources:
            return self._run_attempts()

    def _run_attempts(self) -> Outcome:
        limit = self._run.run_config.failure_config.max_node_failures
        number = 0
        while True:
            try:
                outcome = self._run_attempt(number, avoided_nodes(self._history, limit))
                if self._interrupts.error is not None:  # the function had finished before it could be told
                    raise self._interrupts.error
                return outcome
            except Resize as resize:
                self._run.console.print(f"{self._run.name}: {resize}; starting again with them", error=True)
                self._last_number = max(self._last_number, self._checkpoints.sweep()[1])
            except RunFailed as failed:
                if self._interrupts.error is not None:
                    raise self._interrupts.error from None
                failed.history = tuple(self._history)
                retrying = _can_retry(failed.failure) and self._decide(failed.failure, self._history)
                unheard = self._callbacks.close("on_failure", failed.failure, retrying)
                if unheard is not None:
                    failed.notes += (f"also: {unheard}",)
                if unheard is not None or not retrying:
                    raise
                if failed.failure.kind is FailureKind.HANG:
                    self._run.console.print(f"{self._run.name}: {failed.failure.exception}", error=True)
                self._history.append(failed.failure)
                self._last_number = max(self._last_number, self._checkpoints.sweep()[1])
            number += 1

    def _run_attempt(self, number: int, avoided: frozenset[str]) -> Outcome:
        try:
            with self._runtime.launch(self._group_spec(avoided)) as group:
                return self._drive(group, number, avoided)
        except (Resize, RunFailed, RunCancelledError, ConfigurationError, PluginError, ResourceError):
            raise
        except Exception as error:  # of a backend, a callback or the runtime
            raise RunFailed(controller_failure(error)) from None

    def _drive(self, group: Group, number: int, avoided: frozenset[str]) -> Outcome:
        """Has a group train, and closes what the attempt has opened; the first thing that went wrong is raised."""
        attempt: Attempt | None = None
        ended_well = False
        try:
            self._callbacks.call("on_group_start", number, list(group.workers))
            attempt = self._start(group, number, avoided)
            self._current = group, attempt
            outcome = self._follow(group, attempt, number)
            ended_well = True
            return outcome
        finally:
            self._current = None
            self._interrupts.on_notice = None
            if attempt is not None:
                self._last_number = attempt.last_number
            error: Exception | None = self._callbacks.close("on_group_stop", number)
            try:
                self._backend.close()
            except Exception as raised:  # whatever a plugin raises
                error = error or raised
            if error is not None:
                if ended_well:
                    raise error
                self._run.console.print(f"{self._run.name}: while ending the attempt: {error}", error=True)

    def _follow(self, group: Group, attempt: Attempt, number: int) -> Outcome:
        """Follows an attempt to its end, past losses that the other ranks survive."""
        while True:
            try:
                return attempt.follow(group)
            except RunFailed as failed:
                lost = attempt.lost if self._backend.survives_losses else []
                if not lost or not self._decide(failed.failure, self._history):
                    raise
                if not self._replace(group, attempt, number, lost):
                    raise
                failure = replace(failed.failure, survived=True)
                self._history.append(failure)
                self._callbacks.call("on_failure", failure, True)
                self._run.console.print(f"{self._run.name}: ranks {lost} were replaced, the others stay", error=True)

    def _replace(self, group: Group, attempt: Attempt, number: int, lost: Sequence[int]) -> bool:
        """Has new processes take the places of lost ones; False if a rank does not wait for them."""
        try:
            group.replace(lost)
            future = self._backend.rejoin(group, lost)
            if not attempt.await_rejoin(group, future) or (last_report := attempt.renumber(group)) is None:
                return False
            rendezvous = dict(zip(lost, future.result(), strict=True))
        except (WorkerDiedError, WaitTimeoutError):  # no room for new processes, say: all are replaced
            return False
        attempt.go_on(group.workers, last_report)
        checkpoint = self._latest_checkpoint()
        group.train([self._task(group, rank, rendezvous[rank], checkpoint, number, last_report) for rank in lost])
        return True

    def _decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        try:
            return self._policy.decide(failure, history)
        except Exception as error:  # of a user's policy
            raise CallbackError(f"FailureConfig(policy=...) raised {type(error).__name__}: {error}") from error

    def _choose_size(self, avoided: frozenset[str]) -> int:
        """How many workers the next attempt has; a run that is not elastic waits for the room that it wants."""
        scaling = self._run.scaling_config
        if not self._elastic:
            return max(1, scaling.max_workers)
        return target_size(scaling, self._runtime.room(scaling, (), avoided))

    def _scaling_for(self, size: int) -> ScalingConfig:
        """What the run asks for, with a number for an elastic run's bounds."""
        scaling = self._run.scaling_config
        return scaling if scaling.num_workers == scaling.max_workers else replace(scaling, num_workers=size)

    def _group_spec(self, avoided: frozenset[str]) -> GroupSpec:
        count = self._choose_size(avoided)
        return replace(
            group_spec(self._run.run_config, self._scaling_for(count), self._backend, self._interrupts),
            log_directory=self._run.path / "logs" if self._run.run_config.log_to_file else None,
            console=self._run.console,
            run_resources=self._run_resources,
            elastic=self._elastic,
            avoided=avoided,
        )

    def _start(self, group: Group, number: int, avoided: frozenset[str]) -> Attempt:
        rendezvous = self._backend.rendezvous(group)
        self._probe_storage(group)
        latest = self._checkpoints.verify()
        checkpoint = self._checkpoints.checkpoint(latest) if latest else self._initial_checkpoint
        if number > 0 or self._number_of_start > 1:
            self._callbacks.call("on_resume", latest.iteration if latest else 0)
        # Held while the workers use them: Ray ends the actor that splits a dataset when this process lets go of it.
        self._held_shards = self._shards(group.workers, checkpoint)
        last_report = ReportNumber(self._last_number, latest.iteration if latest else 0)
        attempt = Attempt(
            run=self._run,
            workers=group.workers,
            storage=self._storage,
            checkpoints=self._checkpoints,
            callbacks=self._callbacks,
            interrupts=self._interrupts,
            room=lambda: self._runtime.room(self._run.scaling_config, group.workers, avoided),
            last_report=last_report,
            backend=self._backend.name,
            started=time.monotonic(),
        )
        group.train(
            [
                self._task(group, worker.rank, rendezvous[worker.rank], checkpoint, number, last_report)
                for worker in group.workers
            ]
        )
        return attempt

    def _latest_checkpoint(self) -> Checkpoint | None:
        latest = self._checkpoints.verify()
        return self._checkpoints.checkpoint(latest) if latest else self._initial_checkpoint

    def _task(
        self,
        group: Group,
        rank: int,
        rendezvous: Mapping[str, str],
        checkpoint: Checkpoint | None,
        number: int,
        last_report: ReportNumber,
    ) -> TrainTask:
        worker, world_size, config = group.workers[rank], len(group.workers), self._run.run_config
        return TrainTask(
            function=self._function,
            backend=self._backend,
            rendezvous=rendezvous,
            context=TrainContext(
                worker=worker,
                world_size=world_size,
                local_world_size=sum(other.node_id == worker.node_id for other in group.workers),
                run_name=self._run.name,
                run_id=self._run.id,
                trial=self._run.trial,
                storage=self._storage,
                attempt=number,
                metadata=self._metadata,
                trial_resources=self._scaling_for(world_size).total_resources,
                checkpoint_config=config.checkpoint_config,
            ),
            checkpoint=checkpoint,
            last_report=last_report,
            options=SessionOptions(
                checkpoints=config.checkpoint_config,
                sync=config.sync_config,
                start=self._number_of_start,
                chdir=config.chdir_to_trial_dir,
            ),
            datasets=self._held_shards[rank],
            wants_value=self._all_values or rank == 0,
        )

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


def group_spec(config: RunConfig, scaling: ScalingConfig, backend: Backend, interrupts: Interrupts) -> GroupSpec:
    """The group that runs of a configuration want, without what only one of them does.

    Args:
        config: the runs'.
        scaling: the size as a number.
        backend: what sets the framework up.
        interrupts: what ends the group's start.
    """
    count = max(1, scaling.max_workers)
    shown = {"rank0": frozenset((0,)), "all": frozenset(range(count)), "none": frozenset[int]()}
    return GroupSpec(
        num_workers=count,
        scaling=scaling,
        preload=(*backend.preload, *config.preload),
        warmup=backend.warmup,
        preload_environment=backend.preload_environment,
        log_directory=None,
        shown_ranks=shown[config.worker_output],
        console=Console(),
        start_timeout_s=config.start_timeout_s,
        interrupts=interrupts,
        run_resources=contextlib.ExitStack(),
    )


def _find_run(storage: Storage, run_id: str, start: int) -> str | None:
    try:
        storage.require_run(run_id, start)
    except Exception as error:  # whatever a filesystem's library raises
        return str(error)
    return None


def controller_failure(error: Exception) -> Failure:
    """The failure that an exception on the controller's side amounts to."""
    if isinstance(error, CallbackError):
        cause = error.__cause__ or error
        return Failure(kind=classify(cause), summary=str(error), exception=cause)
    kind = classify(error)
    if isinstance(error, WaitTimeoutError):
        kind = FailureKind.HANG
    elif isinstance(error, WorkerDiedError):
        kind = FailureKind.INFRASTRUCTURE
    return Failure(kind=kind, summary=one_line(error), exception=error)


def _can_retry(failure: Failure) -> bool:
    """Failures of the controller's own making, such as a callback's, would only come again."""
    if isinstance(failure.exception, RunInUseError):
        return False
    return failure.rank is not None or failure.kind in _RETRIED
