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
from drivetrain._wire.events import TRAINING, Event, Failed, PhaseEntered, Pickled, Returned
from drivetrain._wire.task import TrainTask
from drivetrain._worker.preemption import Preemption
from drivetrain._worker.session import Session, activate
from drivetrain._worker.workspace import open_workspace

__all__ = ["execute", "flush_output", "redirect_output"]


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


def execute(
    task: TrainTask,
    emit: Callable[[Event], None],
    preemption: Preemption,
    *,
    settle_output: Callable[[], None] = flush_output,
    in_driver: bool = False,
) -> None:
    """Runs a train function in its session, and emits how it ended.

    Args:
        task: what to run.
        emit: takes the events.
        preemption: what the train function is told of.
        settle_output: see :func:`drivetrain._worker.main.serve`.
        in_driver: this is the driver's own process: values and exceptions stay the objects that they are, and
            Ctrl-C and ``sys.exit()`` mean the driver.
    """
    rank = task.context.get_world_rank()
    phase = ""

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        emit(PhaseEntered(rank, name, time.time()))

    value: Any = None
    failed_at: float | None = None
    try:
        enter("loading the train function")
        function, config = pickle.loads(task.function)
        enter(f"setting up {task.backend.name}")
        with open_workspace(task.context, task.options) as (context, on_checkpoint):
            session = Session(
                context=context,
                checkpoint=task.checkpoint,
                first_index=task.first_index,
                first_number=task.first_number,
                first_quiet=task.first_quiet,
                emit=emit,
                preemption=preemption,
                options=task.options,
                on_checkpoint=on_checkpoint,
                emit_from_threads=not in_driver,
                datasets=task.datasets,
            )
            with activate(session), task.backend.session(context, task.rendezvous):
                enter(TRAINING)
                try:
                    with contextlib.suppress(_CleanExit), _exit_as_return():
                        value = function(config) if takes_config(function) else function()
                    session.finish()
                except BaseException as error:
                    failed_at = time.time()  # before the backend is left, which may take its time or fail others
                    if in_driver and isinstance(error, Exception):  # no end of a process ends its uploads
                        session.wait_for_uploads()
                    raise
                enter(f"taking {task.backend.name} down")
    except Exception as error:
        settle_output()
        emit(Failed(rank, failed_at or time.time(), phase, error if in_driver else capture_failure(error)))
    except (KeyboardInterrupt, SystemExit) as error:
        if in_driver:
            raise
        settle_output()
        emit(Failed(rank, failed_at or time.time(), phase, capture_failure(error)))
    else:
        returned = None if not task.wants_value else value if in_driver else _pickle_value(value)
        settle_output()
        emit(Returned(rank, returned, preemption.was_told))


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
