"""The runtime without workers: the train function runs in this process and thread, so ``breakpoint()`` works."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain._base.interrupts import Interrupts
from drivetrain._hooks.context import WorkerInfo
from drivetrain._hooks.helpers import temporary_environment
from drivetrain._runtimes.base import GroupSpec, Runtime, rank_environment
from drivetrain._runtimes.launchers import find_launcher
from drivetrain._runtimes.reservations import Reservation, reserves_gpus
from drivetrain._runtimes.resources import partition_gpus, visible_gpus
from drivetrain._runtimes.stacks import own_stacks
from drivetrain._wire.commands import RunningTaskCommand
from drivetrain._wire.events import Event, Failed, Returned
from drivetrain._wire.task import TrainTask
from drivetrain._worker.execute import Finished, Raised, RunningTask, Unwinding, run_in_session
from drivetrain._worker.main import notify
from drivetrain._worker.output import flush_output
from drivetrain._worker.session import Outbox
from drivetrain.errors import ConfigurationError, StorageError

if TYPE_CHECKING:
    from drivetrain.config import ScalingConfig

__all__ = ["InProcessRuntime"]

T = TypeVar("T")


class InProcessGroup:
    """A group whose only worker is this process.

    Args:
        gpus: the GPUs of this process.
        interrupts: requests to end the run.
        cleanup: a stack that is closed at the end of the attempt.
    """

    def __init__(self, gpus: tuple[str, ...], interrupts: Interrupts, cleanup: contextlib.ExitStack) -> None:
        self._interrupts = interrupts
        self._cleanup = cleanup
        self._running: RunningTask | None = None
        self.workers = (
            WorkerInfo(
                rank=0,
                local_rank=0,
                node_rank=0,
                node_id="localhost",
                hostname=socket.gethostname(),
                ip="127.0.0.1",
                pid=os.getpid(),
                accelerator_ids=gpus,
            ),
        )
        self._task: TrainTask | None = None

    def run(self, fn: Callable[..., T], /, *args: Any, ranks: Sequence[int] | None = None) -> list[T]:
        """Call the function in this process, if rank 0 is selected."""
        return [fn(*args)] if ranks is None or 0 in ranks else []

    def set_environment(self, variables: Mapping[int, Mapping[str, str]]) -> None:
        """Set the variables of rank 0 in this process."""
        self._cleanup.enter_context(temporary_environment(variables[0]))

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """Store the task. :meth:`pump` runs it."""
        self._task = tasks[0]

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """Run the train function to its end. Events are delivered while it runs, for example when it reports."""
        assert self._task is not None
        task, self._task = self._task, None
        is_over = False
        raised: BaseException | None = None

        def run_driver(event: Event | None = None) -> None:
            nonlocal is_over, raised
            if not is_over:
                try:
                    self._interrupts.act()
                    is_over = event is not None and deliver(event)
                except Unwinding:  # raised by a nested call, which delivered the response to a command
                    raise
                except BaseException as error:
                    is_over, raised = True, error
            if is_over:  # also after the train function has caught an earlier Unwinding
                raise Unwinding from None

        self._running = RunningTask(0, Outbox(run_driver, from_threads=False), run_driver)
        with contextlib.suppress(Unwinding):
            _report_outcome(run_in_session(task, self._running), task, self._running)
        if raised is not None:
            raise raised

    def _unsupported(self, *arguments: Any, **named: Any) -> Any:
        """Raise an error. This process is also the driver, so it cannot be lost and replaced during a run."""
        raise NotImplementedError

    replace = woken_by = _unsupported

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """Perform the command. Rank 0 is this process."""
        if self._running is not None and 0 in ranks:
            notify(self._running, command)

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the stacks of this process. This method is called from another thread."""
        return dict.fromkeys(ranks, own_stacks())

    def park(self) -> bool:
        """Return False. Reusing this group would save no time."""
        return False

    def reuse(self, spec: GroupSpec) -> bool:
        """Return False. See :meth:`park`."""
        return False


def _report_outcome(outcome: Finished | Raised, task: TrainTask, running: RunningTask) -> None:
    """Report an outcome within this process. The event contains the value or the exception itself, not a pickled copy.

    Raises:
        KeyboardInterrupt: the train function raised it: Ctrl-C is meant for the driver.
        SystemExit: the train function raised it: ``sys.exit()`` exits the driver.
    """
    flush_output()
    match outcome:
        case Finished():
            value = outcome.value if task.needs_value else None
            running.outbox.emit(Returned(running.rank, value, *running.preemption.describe_return()))
        case Raised(error=KeyboardInterrupt() | SystemExit()):
            raise outcome.error
        case Raised():
            running.outbox.emit(Failed(running.rank, outcome.time, outcome.state, outcome.error, outcome.kind))


class InProcessRuntime(Runtime):
    """Runs the train function in the calling process."""

    name = "inprocess"
    in_driver = True

    def validate(self, scaling: ScalingConfig) -> None:
        """Check that there is at most one worker, that it is the only process, and that there are enough GPUs."""
        if scaling.max_workers > 1:
            raise ConfigurationError(
                '[DT-105] ScalingConfig(num_workers=...): expected 0 or 1 with runtime="inprocess", got '
                f'{scaling.num_workers}. Set runtime="local"'
            )
        if (launched := find_launcher()) is not None:
            raise ConfigurationError(
                f"[DT-105] ScalingConfig(num_workers={scaling.num_workers}): expected a single process, got one of "
                f"{launched.processes} processes of {launched.launcher} ({launched.variable}={launched.processes}), "
                "each of which would train a model of its own. Start the script without the launcher, with "
                f"num_workers={launched.processes}"
            )
        _own_gpus(scaling)

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Return 1: this process is the only worker."""
        return 1

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[InProcessGroup]:
        """Set the environment variables of rank 0 in this process, and restore them when the context is left."""
        gpus = _own_gpus(spec.scaling)
        with contextlib.ExitStack() as cleanup:
            if gpus and reserves_gpus():
                with contextlib.suppress(StorageError):  # other runs will not see it
                    cleanup.callback(_reserve(spec, gpus).release)
            group = InProcessGroup(gpus, spec.interrupts, cleanup)
            ranks = rank_environment(group.workers[0], world_size=1, local_world_size=1)
            cleanup.enter_context(temporary_environment({**spec.environment, **ranks}))
            yield group


def _own_gpus(scaling: ScalingConfig) -> tuple[str, ...]:
    return partition_gpus(dataclasses.replace(scaling, num_workers=1), visible_gpus())[0]


def _reserve(spec: GroupSpec, gpus: Sequence[str]) -> Reservation:
    """Reserve the GPUs that a framework in this process uses by itself, even if other runs use them too."""
    reservation = Reservation(spec.output.console.name or "without a name")
    reservation.take(gpus, len(gpus), shared=0 < spec.scaling.num_gpus_per_worker < 1)
    reservation.use_anyway(gpus, len(gpus))
    return reservation
