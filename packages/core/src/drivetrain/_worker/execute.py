"""Runs a train function once, in its session, and emits how it ended."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from drivetrain._base.failure import capture_failure
from drivetrain._wire.commands import CountSteps, Renumber, RunningTaskCommand, StopAfter
from drivetrain._wire.events import Event, Failed, PhaseEntered, Pickled, RankState, Renumbered, Returned
from drivetrain._wire.task import TrainTask
from drivetrain._worker.preemption import Preemption
from drivetrain._worker.session import Outbox, Session, activate
from drivetrain._worker.workspace import open_workspace

__all__ = ["RunningTask", "execute", "flush_output", "redirect_output"]


def flush_output() -> None:
    """Has everything that was printed reach the standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def redirect_output(descriptor: int) -> None:
    """Has the standard output and error go elsewhere, and closes the descriptor that says where."""
    flush_output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class RunningTask:
    """One run of the train function, as the driver's commands reach it.

    Args:
        rank: the rank.
        emit: sends an event to the driver.
        before_poll: see :class:`~drivetrain._worker.preemption.Preemption`.
    """

    def __init__(self, rank: int, emit: Callable[[Event], None], before_poll: Callable[[], None] | None = None) -> None:
        self.rank = rank
        self.emit = emit
        self.preemption = Preemption(rank, emit, before_poll)
        self.session: Session | None = None
        self.is_over = False

    @property
    def can_end_gracefully(self) -> bool:
        """Whether the train function is running and polls for notices."""
        return self.preemption.is_polled and not self.is_over

    def perform(self, command: RunningTaskCommand) -> None:
        """Performs a command; called from another thread than the train function's."""
        match command:
            case CountSteps():
                self.preemption.count_steps()
            case StopAfter():
                self.preemption.stop_after(command.step, command.info)
            case Renumber():
                self.preemption.restart_count()
                if self.session is not None:
                    self.session.renumber(command.last_report)
                self.emit(Renumbered(self.rank))


def execute(
    task: TrainTask,
    running: RunningTask,
    *,
    settle_output: Callable[[], None] = flush_output,
    in_driver: bool = False,
) -> None:
    """Runs a train function in its session, and emits how it ended.

    Args:
        task: what to run.
        running: receives the driver's commands meanwhile, and sends the events.
        settle_output: see :func:`drivetrain._worker.main.serve`.
        in_driver: this is the driver's own process: values and exceptions stay the objects that they are, and
            Ctrl-C and ``sys.exit()`` mean the driver.
    """
    rank, emit = running.rank, running.emit
    state = RankState.WAITING

    def enter(entered: RankState) -> None:
        nonlocal state
        state = entered
        emit(PhaseEntered(rank, entered, time.time()))

    value: Any = None
    failed_at: float | None = None
    try:
        enter(RankState.LOADING)
        function, config = pickle.loads(task.function)
        enter(RankState.SETTING_UP)
        with open_workspace(task.context, task.options) as (context, on_checkpoint):
            outbox = Outbox(emit, from_threads=not in_driver)
            session = running.session = Session(task, context, outbox, running.preemption, on_checkpoint)
            with activate(session), task.backend.session(context, task.rendezvous):
                enter(RankState.TRAINING)
                try:
                    with contextlib.suppress(_CleanExit), _exit_as_return():
                        value = function(config) if takes_config(function) else function()
                    session.finish()
                except BaseException as error:
                    failed_at = time.time()  # before the backend is left, which may take its time or fail others
                    if in_driver and isinstance(error, Exception):  # no end of a process ends its uploads
                        session.wait_for_uploads()
                    raise
                enter(RankState.TEARING_DOWN)
    except Exception as error:
        settle_output()
        emit(Failed(rank, failed_at or time.time(), state, error if in_driver else capture_failure(error)))
    except (KeyboardInterrupt, SystemExit) as error:
        if in_driver:
            raise
        settle_output()
        emit(Failed(rank, failed_at or time.time(), state, capture_failure(error)))
    else:
        returned = None if not task.wants_value else value if in_driver else _pickle_value(value)
        settle_output()
        emit(Returned(rank, returned, running.preemption.was_notified))


def takes_config(function: Callable[..., Any]) -> bool:
    """Whether a train function takes the config as its one argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return any(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)


class _CleanExit(BaseException):
    """The train function left by sys.exit() with success."""


@contextlib.contextmanager
def _exit_as_return() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        if error.code in (None, 0):
            raise _CleanExit from None
        raise


def _pickle_value(value: Any) -> Pickled | None:
    if value is None:
        return None
    try:
        return Pickled(cloudpickle.dumps(value))
    except Exception:  # whatever a user's class may raise; the training itself succeeded
        warnings.warn(
            f"the train function's value is None, because a {type(value).__name__} cannot be pickled:\n"
            + traceback.format_exc(limit=0),
            stacklevel=1,
        )
        return None
