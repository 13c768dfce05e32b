"""Runs a train function once, in a session.

:func:`run_in_session` returns the outcome, :class:`Finished` or :class:`Raised`, and the caller reports it to the
driver. A worker process does this with :func:`report_outcome`. The in-process runtime reports it without pickling.
"""

from __future__ import annotations

import copy
import inspect
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from drivetrain._base.failure import behind_exit, capture_failure
from drivetrain._base.script import dumps_to_driver, explain_absent, unpack
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import TrainContext
from drivetrain._wire.events import Failed, PhaseEntered, Pickled, RankState, Renumbered, ReportNumber, Returned
from drivetrain._wire.task import PackedFunction, TrainTask
from drivetrain._worker.observer import end_observer, start_observer
from drivetrain._worker.preemption import Preemption, StopTraining
from drivetrain._worker.session import Outbox, Session, activate
from drivetrain._worker.workspace import open_workspace
from drivetrain.errors import BackendError, ConfigurationError, FailureKind

__all__ = [
    "Finished",
    "Raised",
    "RunningTask",
    "Unwinding",
    "report_outcome",
    "run_in_session",
]


class Unwinding(BaseException):
    """Unwinds a train function in the driver's process. It is not an outcome of the train function."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The train function returned, or called ``sys.exit()`` with success.

    Attributes:
        value: the return value of the train function; None after ``sys.exit()``.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The train function, the setup before it or the teardown after it raised an exception.

    Attributes:
        error: the exception.
        state: the state of the rank when the exception was raised.
        time: Unix time in seconds when the exception was raised.
        kind: the category of the exception, if the backend knows it.
    """

    error: BaseException
    state: RankState
    time: float
    kind: FailureKind | None


class RunningTask:
    """Tracks one run of the train function. The thread that receives the driver's commands uses it too.

    Args:
        rank: the rank.
        outbox: sends events to the driver.
        before_poll: see :class:`~drivetrain._worker.preemption.Preemption`.
    """

    def __init__(self, rank: int, outbox: Outbox, before_poll: Callable[[], None] | None = None) -> None:
        self.rank = rank
        self.outbox = outbox
        self.preemption = Preemption(rank, outbox.emit, before_poll)
        self.state = RankState.WAITING
        self.session: Session | None = None
        self.is_over = False

    @property
    def progress(self) -> int:
        """A number that increases with each heartbeat and each poll for preemption notices."""
        return self.outbox.heartbeats + self.preemption.steps

    @property
    def can_end_gracefully(self) -> bool:
        """True if the train function is running and polls for preemption notices."""
        return self.preemption.is_polled and not self.is_over

    def enter(self, state: RankState) -> None:
        """Set the state of the rank, and notify the driver."""
        self.state = state
        self.outbox.emit(PhaseEntered(self.rank, state, time.time(), time.monotonic()))

    def interrupt(self, number: int) -> None:
        """Send a signal to the train function, which runs on the main thread."""
        main_thread = threading.main_thread().ident
        if not self.is_over and main_thread is not None:
            signal.pthread_kill(main_thread, number)

    def renumber(self, last_report: ReportNumber) -> None:
        """Set the report number and the iteration from which to continue counting, and notify the driver."""
        self.preemption.restart_count()
        if self.session is not None:
            self.session.renumber(last_report)
        self.outbox.emit(Renumbered(self.rank))


def run_in_session(task: TrainTask, running: RunningTask) -> Finished | Raised:
    """Run a train function in a session, and return the outcome.

    ``sys.exit()`` with success and :class:`StopTraining` count as a return of None. Every other exception is returned
    as :class:`Raised`, including ``KeyboardInterrupt`` and ``SystemExit``: only the caller knows whether they concern
    the train function or the whole process.

    Args:
        task: the train function and everything that it needs.
        running: sends the events, and receives the driver's commands during the run.
    """
    failed_at: float | None = None
    try:
        running.enter(RankState.LOADING)
        function, config = _loaded(task.function)
        running.enter(RankState.SETTING_UP)
        with open_workspace(task.context, task.options) as (context, on_checkpoint):
            session = running.session = Session(task, context, running.outbox, running.preemption, on_checkpoint)
            with activate(session), _session_of(task.backend, context, task.rendezvous):
                running.enter(RankState.TRAINING)
                try:
                    try:
                        start_observer(context, task.last_report.iteration)
                        value = _call(function, config)
                        if not session.has_reported:
                            _require_training(value)
                    except StopTraining:
                        value = None
                    except SystemExit as error:
                        if error.code not in (None, 0):
                            raise
                        value = None
                    session.finish()
                except BaseException as error:
                    failed_at = time.time()  # not later, because the teardown may take long or fail
                    session.abandon(error)
                    raise
                finally:
                    end_observer()
                running.enter(RankState.TEARING_DOWN)
    except Unwinding:
        raise
    except BaseException as error:
        explain_absent(error)
        return Raised(error, running.state, failed_at or time.time(), _classify(task.backend, error))
    return Finished(value)


def _call(function: Callable[..., Any], config: Any) -> Any:
    return function(config) if takes_config(function) else function()


def _require_training(value: object) -> None:
    """Check what a function that has reported nothing has returned.

    Raises:
        ConfigurationError: it is a coroutine or a generator, which trains nothing unless it is run.
    """
    if inspect.iscoroutine(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if not inspect.isasyncgen(value):
            value.close()  # without a warning about a coroutine that was never awaited
        raise ConfigurationError(
            "[DT-104] train_loop_per_worker: expected a function that trains when it is called, but it returned a "
            f"{type(value).__name__}, {value.__qualname__}(). Run it in the train function, for example with "
            "asyncio.run() or a loop"
        )


def _loaded(packed: PackedFunction) -> tuple[Callable[..., Any], Any]:
    if isinstance(packed, bytes):
        loaded: tuple[Callable[..., Any], Any] = unpack(packed)
        return loaded
    function, config = packed
    try:
        return function, copy.deepcopy(config)  # as for workers, changes do not affect the driver or the next attempt
    except Exception:  # objects such as locks cannot be copied, and need not be copied in the driver's process
        return function, copy.copy(config)


def report_outcome(
    outcome: Finished | Raised, task: TrainTask, running: RunningTask, flush_output: Callable[[], None]
) -> None:
    """Report an outcome from a worker process to the driver, with the value or the exception pickled.

    Args:
        outcome: the outcome.
        task: the task that was run.
        running: sends the event.
        flush_output: sends the rest of the train function's output. Called first, so that the driver receives the
            output before the event.
    """
    event: Returned | Failed
    match outcome:
        case Finished():
            value = _pickle_value(outcome.value) if task.needs_value else None
            event = Returned(running.rank, value, *running.preemption.describe_return())
        case Raised():
            event = Failed(running.rank, outcome.time, outcome.state, capture_failure(outcome.error), outcome.kind)
    flush_output()
    running.outbox.emit(event)


def _session_of(backend: Backend, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return the context manager of a backend.

    Raises:
        BackendError: the backend returned something else.
    """
    session: object = backend.session(context, rendezvous)
    if isinstance(session, AbstractContextManager):
        return session
    if isinstance(session, Generator):
        problem = "got a generator. Decorate it with @contextlib.contextmanager"
    else:
        problem = f"got {session!r:.200}. Add a yield, and decorate it with @contextlib.contextmanager"
    where = f"backend {backend.name!r} failed in session (rank {context.get_world_rank()})"
    raise BackendError(f"[DT-607] {where}: expected a context manager, {problem}")


def _classify(backend: Backend, error: BaseException) -> FailureKind | None:
    """Return the category that a backend assigns to an exception; None if it assigns none, or fails."""
    try:
        kind: object = backend.classify(behind_exit(error))
    except BaseException:  # a plugin may raise anything
        problem = f"raised an exception:\n{traceback.format_exc()}"
    else:
        if kind is None or isinstance(kind, FailureKind):
            return kind
        problem = f"expected a FailureKind or None, got {kind!r}"
    warnings.warn(f"backend {backend.name!r} failed in classify: {problem}", stacklevel=1)
    return None


def takes_config(function: Callable[..., Any]) -> bool:
    """Return True if a train function takes the config as its argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return any(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)


def _pickle_value(value: Any) -> Pickled | None:
    if value is None:
        return None
    try:
        return Pickled(dumps_to_driver(value))
    except Exception:  # a user's class may raise anything, and the training itself succeeded
        warnings.warn(
            f"the train function's return value is replaced by None, because a {type(value).__name__} cannot be "
            "pickled:\n" + traceback.format_exc(limit=0),
            stacklevel=1,
        )
        return None
