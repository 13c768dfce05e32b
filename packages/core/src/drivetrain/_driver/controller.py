"""Drives a run: starts attempts, each with its own worker group, until one succeeds or the failure policy gives up.

The controller does not handle processes itself. It receives events from the worker group of a runtime, so a test can
replace the processes by a list of events.
"""

from __future__ import annotations

import contextlib
import operator
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import SupportsIndex

from drivetrain._base.console import Console
from drivetrain._base.failure import Failure, one_line
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.ports import port_variables
from drivetrain._base.wakeup import MAX_POLL_S
from drivetrain._driver.attempt import Attempt
from drivetrain._driver.backendsetup import BackendSetup, environment_of
from drivetrain._driver.diagnosis import failure_in_driver
from drivetrain._driver.outcomes import AttemptFailed, Ending, Grow, RunFailed, Succeeded
from drivetrain._driver.policies import Decision, ask, avoided_nodes
from drivetrain._driver.services import RunServices
from drivetrain._driver.tasks import TaskFactory, require_pickling_of_task, scaling_for
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import WorkerInfo
from drivetrain._hooks.policy import FailurePolicy
from drivetrain._runtimes.base import Group, GroupOutput, GroupSpec, RoomTakenError, Runtime
from drivetrain._runtimes.stacks import own_stacks
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import LOGS
from drivetrain._wire.events import ReportNumber
from drivetrain._worker.observer import observer_variables
from drivetrain.config import RunConfig, ScalingConfig
from drivetrain.errors import (
    ConfigurationError,
    FailureKind,
    PluginBrokenError,
    PluginError,
    ResourceError,
    RunCancelledError,
    RunInUseError,
    WaitTimeoutError,
    WorkerDiedError,
)

__all__ = ["Controller", "group_spec"]

_RETRIED = (FailureKind.INFRASTRUCTURE, FailureKind.HANG, FailureKind.PREEMPTION, FailureKind.STORAGE)
"""Kinds of failure that a retry can resolve even if no rank failed: a disk has space again, a network recovers."""


class Controller:
    """Drives one run.

    Args:
        services: the services of the run.
        runtime: the runtime that starts the worker groups.
        tasks: creates the tasks of the workers.
        policy: the policy that decides about retries.
        resume_from: the checkpoint to resume from as long as the run has no checkpoint of its own.
        last_number: the highest report number that the run has used so far.
    """

    def __init__(
        self,
        services: RunServices,
        runtime: Runtime,
        tasks: TaskFactory,
        policy: FailurePolicy,
        *,
        resume_from: Checkpoint | None = None,
        last_number: int = 0,
    ) -> None:
        self._services = services
        self._run = services.run
        self._runtime = runtime
        self._tasks = tasks
        self._policy = policy
        self._initial_checkpoint = resume_from
        # The last commit before the current attempt or the latest failure.
        self._committed_before = services.checkpoints.last_number
        self._last_number = max(last_number, services.checkpoints.last_number)
        self._current: Attempt | None = None
        self._history: list[Failure] = []
        self._run_resources = contextlib.ExitStack()

    def describe(self) -> str:
        """Describe what each rank is doing, with stacks. May be called from any thread."""
        current = self._current
        if current is None:
            return f"no worker is running the train function; stack of the driver:\n{own_stacks()}"
        return current.describe()

    def run(self) -> Succeeded | RunFailed:
        """Run attempts until one succeeds, or until the failure policy gives up.

        Raises:
            BaseException: the run was interrupted or cancelled, and the train function has not finished.
            Exception: the run cannot be started.
        """
        with self._run_resources:
            number = 0
            while True:
                ending = self._run_attempt(number)
                if isinstance(ending, Succeeded):
                    return ending
                if self._services.interrupts.error is not None:
                    raise self._services.interrupts.error
                if isinstance(ending, Grow):
                    self._print(f"there is room for {ending.size} workers; restarting with all of them")
                elif (failed := self._retry_or_give_up(ending, number)) is not None:
                    return failed
                self._last_number = max(self._last_number, self._services.checkpoints.sweep()[1])
                number += 1

    def _retry_or_give_up(self, ending: AttemptFailed, number: int) -> RunFailed | None:
        """Ask the policy whether to retry a failed attempt; return None for a retry, else the outcome of the run."""
        failure = self._with_progress(ending.failure, number)
        decision = self._ask_policy(failure) if _can_retry(failure) else Decision(None)
        retrying, notes = decision.delay_s is not None, ending.notes + decision.notes
        callback_error = self._services.callbacks.close("on_failure", failure, retrying)
        if callback_error is not None:
            notes += (f"also: {callback_error}",)
        if callback_error is not None or not retrying:
            return RunFailed(failure, notes, tuple(self._history), ending.ranks)
        if failure.kind is FailureKind.HANG:
            self._print(str(failure.exception))
        self._history.append(failure)
        self._pause(decision.delay_s or 0.0)
        return None

    def _with_progress(self, failure: Failure, attempt: int) -> Failure:
        """Return the failure with its attempt, and whether a checkpoint was committed since the previous failure."""
        last_committed = self._services.checkpoints.last_number
        made_progress = failure.made_progress or last_committed > self._committed_before
        self._committed_before = last_committed
        return replace(failure, made_progress=made_progress, attempt=attempt)

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt.

        Raises:
            BaseException: the end of the run was requested during the wait.
        """
        if not seconds:
            return
        self._print(f"the next attempt starts in {seconds:,.1f} s")
        interrupts = self._services.interrupts
        requested = select.poll()
        requested.register(interrupts.fileno(), select.POLLIN)
        deadline = time.monotonic() + seconds
        while interrupts.error is None and (remaining := deadline - time.monotonic()) > 0:
            if requested.poll(1000 * min(remaining, MAX_POLL_S)):
                interrupts.act()
        if interrupts.error is not None:
            raise interrupts.error

    def _run_attempt(self, number: int) -> Ending:
        avoided = avoided_nodes(self._history, self._run.run_config.failure_config.max_node_failures)
        ending: Ending | None = None
        source: str | None = f"[DT-602] runtime {self._runtime.name!r} failed in launch"
        try:
            spec = self._group_spec(avoided)
            with _require_context(self._runtime, self._runtime.launch(spec)) as group:
                source = None
                _check_group(self._runtime, group, spec)
                ending = self._drive(group, number, avoided)
            return ending
        except RoomTakenError:  # the next specification is for the room that is left
            return self._run_attempt(number)
        except Exception as error:  # raised by a backend, a callback, a dataset provider or the runtime
            if _prevents_attempts(error):
                raise
            if isinstance(ending, AttemptFailed):  # the first failure remains the root cause
                self._print_error(error)
                return ending
            return AttemptFailed(failure_in_driver(error, source))

    def _drive(self, group: Group, number: int, avoided: frozenset[str]) -> Ending:
        """Run an attempt with a worker group, then close everything that the attempt opened.

        An error from closing is raised if the attempt succeeded; otherwise, it is printed.
        """
        interrupts = self._services.interrupts
        try:
            self._services.callbacks.call("on_group_start", number, list(group.workers))
            attempt = self._start(group, number, avoided)
            with interrupts.handled_by(attempt.request_end):
                ending = self._follow(group, attempt, number)
        except BaseException:
            self._print_error(self._close_attempt(number))
            raise
        error = self._close_attempt(number)
        if error is not None and isinstance(ending, Succeeded):
            raise error
        self._print_error(error)
        return ending

    def _close_attempt(self, number: int) -> Exception | None:
        """Notify the callbacks of the end of the attempt, and close the backend; return the first error raised."""
        if self._current is not None:
            self._last_number = self._current.last_number
            if lost := self._current.describe_uncommitted():
                self._print(lost)
        self._current = None
        error = self._services.callbacks.close("on_group_stop", number)
        backend = self._services.backend
        try:
            backend.close()
        except Exception as raised:  # raised by a plugin; the outcome of the attempt does not depend on it
            self._print(f"backend {backend.name!r} failed in close: {one_line(raised)}")
        return error

    def _start(self, group: Group, number: int, avoided: frozenset[str]) -> Attempt:
        setup = self._setup_of(group, number)
        setup.set_environment(range(len(group.workers)))
        rendezvous = setup.rendezvous()
        self._probe_storage(group)
        latest, checkpoint = self._latest_checkpoint()
        iteration = latest.iteration if latest else 0
        if number > 0 and latest is None:
            where = (
                "beginning" if checkpoint is None else f"checkpoint that was passed to the trainer, {checkpoint.path}"
            )
            self._print(f"this attempt starts from the {where}, because the run has no complete checkpoint")
        if number > 0 or self._tasks.driver_count > 1:
            self._services.callbacks.call("on_resume", iteration)
        self._tasks.split_datasets(group.workers, checkpoint)
        last_report = ReportNumber(self._last_number, iteration)
        self._current = attempt = Attempt(
            self._services, group, last_report, lambda: self._target_size(group.workers, avoided)
        )
        self._train(group, range(len(group.workers)), rendezvous, number, checkpoint, last_report)
        return attempt

    def _setup_of(self, group: Group, number: int) -> BackendSetup:
        return BackendSetup(self._services, group, number, in_driver=self._runtime.in_driver)

    def _train(
        self,
        group: Group,
        ranks: Sequence[int],
        rendezvous: Sequence[Mapping[str, str]],
        attempt: int,
        checkpoint: Checkpoint | None,
        last_report: ReportNumber,
    ) -> None:
        tasks = [
            self._tasks.make(group, rank, mapping, attempt=attempt, checkpoint=checkpoint, last_report=last_report)
            for rank, mapping in zip(ranks, rendezvous, strict=True)
        ]
        try:
            group.train(tasks)
        except Exception:  # an object of a plugin may raise any exception when it is pickled
            for task in tasks:
                require_pickling_of_task(task, self._runtime.reduce)
            raise

    def _ask_policy(self, failure: Failure) -> Decision:
        return ask(self._policy, self._run.run_config.failure_config, failure, self._history)

    def _follow(self, group: Group, attempt: Attempt, number: int) -> Ending:
        """Follow an attempt to its end. Replace lost ranks if the backend supports replacement."""
        while True:
            ending = attempt.follow()
            lost = attempt.replaceable if self._services.backend.survives_losses else ()
            if not isinstance(ending, AttemptFailed) or not lost:
                return ending
            ending = replace(ending, failure=self._with_progress(ending.failure, number))
            decision = self._ask_policy(ending.failure)
            if decision.delay_s is None:
                return replace(ending, notes=ending.notes + decision.notes)
            self._pause(decision.delay_s)
            try:
                replaced = self._replace(group, attempt, number, lost)
            except Exception as error:  # raised by a backend, the runtime or the storage
                self._print(f"while replacing ranks {list(lost)}: {error}")
                return ending
            if not replaced:
                return ending
            failure = replace(ending.failure, survived=True)
            self._history.append(failure)
            self._services.callbacks.call("on_failure", failure, True)
            self._print(f"ranks {list(lost)} were replaced; the other ranks continue")

    def _replace(self, group: Group, attempt: Attempt, number: int, lost: Sequence[int]) -> bool:
        """Replace the processes of lost ranks; return False if all processes must be replaced instead."""
        replacement = attempt.start_replacement()
        try:
            group.replace(lost)
            setup = self._setup_of(group, number)
            setup.set_environment(lost)
            future = setup.rejoin(lost)
            rejoined = replacement.await_rejoin(future, self._run.run_config.start_timeout_s)
            last_report = replacement.renumber() if rejoined else None
            if last_report is None:
                return False
            rendezvous = future.result()
        except (WorkerDiedError, WaitTimeoutError):  # for example, there is no room for new processes
            return False
        attempt.resume(lost, group.workers, last_report)
        self._train(group, lost, rendezvous, number, self._latest_checkpoint()[1], last_report)
        return True

    def _target_size(self, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Return the number of workers that the cluster has room for, between the minimum and maximum of the run."""
        scaling = self._run.scaling_config
        room: object = self._runtime.room(scaling, running, avoided)
        if isinstance(room, bool) or not isinstance(room, SupportsIndex):
            raise PluginBrokenError(
                f"[DT-602] runtime {self._runtime.name!r} failed in room: expected a number of workers, got {room!r}"
            )
        return max(scaling.min_workers, min(scaling.max_workers, operator.index(room)))

    @property
    def _is_elastic(self) -> bool:
        return self._run.scaling_config.min_workers < self._run.scaling_config.max_workers

    def _group_spec(self, avoided: frozenset[str]) -> GroupSpec:
        """Return the specification of the next worker group.

        An elastic run starts with as many workers as the cluster has room for. Any other run waits until all its
        workers fit.
        """
        scaling = self._run.scaling_config
        size = self._target_size((), avoided) if self._is_elastic else max(1, scaling.max_workers)
        config, services = self._run.run_config, self._services
        spec = group_spec(config, scaling_for(scaling, size), services.backend, services.interrupts)
        logs = self._run.path / LOGS if config.log_to_file else None
        return replace(
            spec,
            output=replace(spec.output, console=self._run.console, log_directory=logs),
            run_resources=self._run_resources,
            elastic=self._is_elastic,
            avoided=avoided,
        )

    def _latest_checkpoint(self) -> tuple[CommittedCheckpoint | None, Checkpoint | None]:
        """Return the latest intact checkpoint of the run, if any, and the checkpoint to resume from."""
        checkpoints = self._services.checkpoints
        latest = checkpoints.verify()
        return latest, checkpoints.checkpoint(latest) if latest else self._initial_checkpoint

    def _probe_storage(self, group: Group) -> None:
        """Warn early if a node cannot reach the run directory, since the first checkpoint may come hours later."""
        if len({worker.node_id for worker in group.workers}) == 1:
            return
        errors = group.run(_find_run, self._run.storage, self._run.id, self._tasks.driver_count)
        warned: set[str] = set()
        for worker, error in zip(group.workers, errors, strict=True):
            if error is not None and worker.node_id not in warned:
                warned.add(worker.node_id)
                self._print(f"checkpoints reported on {worker.hostname} will be rejected: {error}")

    def _print(self, text: str) -> None:
        self._run.console.print(f"{self._run.name}: {text}", error=True)

    def _print_error(self, error: Exception | None) -> None:
        if error is not None:
            self._print(f"while ending the attempt: {error}")


def group_spec(config: RunConfig, scaling: ScalingConfig, backend: Backend, interrupts: Interrupts) -> GroupSpec:
    """Return the specification of a worker group for a configuration, without the settings that differ between runs.

    Args:
        config: the configuration of the runs.
        scaling: the scaling configuration, with a fixed number of workers.
        backend: the backend that sets up the framework.
        interrupts: the interrupts that can cancel the start of the group.
    """
    count = max(1, scaling.max_workers)
    shown = {"rank0": frozenset((0,)), "all": frozenset(range(count)), "none": frozenset[int]()}
    return GroupSpec(
        num_workers=count,
        scaling=scaling,
        preload=(*backend.preload, *config.preload),
        warmup=backend.warmup,
        preload_environment=backend.preload_environment,
        environment={**environment_of(backend), **observer_variables(), **port_variables(config.ports)},
        output=GroupOutput(console=Console(), shown_ranks=shown[config.worker_output]),
        start_timeout_s=config.start_timeout_s,
        interrupts=interrupts,
        run_resources=contextlib.ExitStack(),
    )


def _prevents_attempts(error: Exception) -> bool:
    """Return True if an error would occur in each attempt."""
    if isinstance(error, PluginBrokenError) and error.__cause__ is not None:
        return False  # the plugin raised an exception, for example because a storage was unreachable
    return isinstance(error, (RunCancelledError, ConfigurationError, PluginError, ResourceError))


def _require_context(runtime: Runtime, launched: AbstractContextManager[Group]) -> AbstractContextManager[Group]:
    """Check that a runtime has returned a context manager.

    Raises:
        PluginBrokenError: it has returned something else, such as a generator.
    """
    if not (hasattr(type(launched), "__enter__") and hasattr(type(launched), "__exit__")):
        raise PluginBrokenError(
            f"[DT-602] runtime {runtime.name!r} failed in launch: expected a context manager, got {launched!r:.200}. "
            "Decorate the method with @contextlib.contextmanager"
        )
    return launched


def _check_group(runtime: Runtime, group: Group, spec: GroupSpec) -> None:
    """Check that a runtime has started the requested workers.

    Raises:
        PluginBrokenError: the group has another size, or its workers are not in the order of their ranks.
    """
    ranks, size = [worker.rank for worker in group.workers], spec.num_workers
    if ranks != list(range(size)):
        raise PluginBrokenError(
            f"[DT-602] runtime {runtime.name!r} failed in launch: expected {size} workers in the order of their ranks, "
            f"got {len(ranks)} with the ranks {ranks[:20]}"
        )


def _find_run(storage: Storage, run_id: str, driver_count: int) -> str | None:
    try:
        storage.require_run(run_id, driver_count)
    except Exception as error:  # a filesystem's library may raise any exception
        return str(error)
    return None


def _can_retry(failure: Failure) -> bool:
    """Return True if a retry can succeed. Most failures in the driver itself, such as in a callback, would recur."""
    if isinstance(failure.exception, RunInUseError):
        return False
    return failure.rank is not None or failure.kind in _RETRIED
