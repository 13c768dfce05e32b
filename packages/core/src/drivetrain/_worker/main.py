"""What runs in a worker process, whoever started it: take commands, run the train function on the main thread."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from drivetrain._base.failure import capture_failure
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import TrainContext
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._wire.events import TRAINING, Event, Failed, Noticed, PhaseEntered, Pickled, Returned
from drivetrain._wire.frames import Channel
from drivetrain._worker.output import open_log
from drivetrain._worker.preemption import Preemption, Signals
from drivetrain._worker.session import Session, SessionOptions, activate
from drivetrain._worker.workspace import open_workspace

__all__ = ["TrainTask", "execute", "flush_output", "redirect_output", "serve", "settle_in"]

_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """Everything one rank needs to run the train function once.

    Attributes:
        function: the pickled pair of train function and config.
        backend: sets the framework up around it.
        rendezvous: this rank's mapping for the backend.
        context: the facts that the function can ask for.
        checkpoint: what to resume from.
        first_index: index in the run of the report before this attempt's first.
        first_number: number in the attempt of the report before this task's first: 0 unless it replaces a lost one.
        first_quiet: how many of the reports up to that one are no iterations.
        options: what the run's configuration says about the worker's side.
        datasets: the rank's shards, by name.
        wants_value: what the function returns is told.
    """

    function: bytes
    backend: Backend
    rendezvous: Mapping[str, str]
    context: TrainContext
    checkpoint: Checkpoint | None
    first_index: int
    options: SessionOptions = field(default_factory=SessionOptions)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    wants_value: bool = True
    first_number: int = 0
    first_quiet: int = 0


def flush_output() -> None:
    """Has everything that was printed reach the standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def serve(channel: Channel, settle_output: Callable[[], None] = flush_output) -> None:
    """Executes commands on the calling thread, which is to be the main one, until the channel closes.

    Another thread reads them, and hears meanwhile what the train function is to be told of a preemption. A process may
    be given one train function after another.

    Args:
        channel: where commands come from.
        settle_output: called before the end of the train function is told, so that its output comes before it.
    """
    signals = Signals()
    listener = _Listener(channel, signals)
    with signals.watched():
        threading.Thread(target=listener.run, daemon=True, name="drivetrain commands").start()
        while (message := listener.commands.get()) is not None:
            command, payload = message[:2]
            if command == "call":
                channel.send(("result", *_call(payload)))
            elif command == "train":
                assert listener.preemption is not None
                preemption = listener.preemption
                execute(pickle.loads(payload), channel.send_event, preemption, settle_output=settle_output)
                preemption.is_over = True
            elif command == "rest":
                gc.collect()  # a model's memory, on a device too, is free for whoever wants it meanwhile


def redirect_output(descriptor: int) -> None:
    """Has the standard output and error go elsewhere, and closes the descriptor that says where."""
    flush_output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def settle_in(rank: int, log_directory: Path | None, since: float) -> bool:
    """In a worker that goes on to another run: writes to that one's log.

    Args:
        rank: the worker's.
        log_directory: where the log is; None leaves the output where it goes.
        since: Unix time in seconds at which the process was started.

    Returns:
        Whether the file of a module that it has imported was changed after that. What is installed does not count.
    """
    if log_directory is not None:
        redirect_output(open_log(log_directory, rank))
    places = [os.path.join(place or os.getcwd(), "") for place in sys.path]
    edited = tuple(place for place in places if not any(name in place for name in _INSTALLED))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return any(_changed_since(file, since) for file in files if isinstance(file, str) and file.startswith(edited))


def _changed_since(file: str, since: float) -> bool:
    try:
        return not any(name in file for name in _INSTALLED) and os.stat(file).st_mtime > since
    except OSError:
        return False


class _Listener:
    """Takes what comes for a worker process: commands, and signals."""

    def __init__(self, channel: Channel, signals: Signals) -> None:
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.preemption: Preemption | None = None
        self._channel = channel
        self._signals = signals

    def run(self) -> None:
        """Goes on until the channel closes."""
        poller = select.poll()
        for source in (self._channel, self._signals):
            poller.register(source, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._signals.fileno() in ready and self._signals.take():
                self._on_sigterm()
            if self._channel.fileno() in ready and not self._receive():
                return

    def _receive(self) -> bool:
        message = self._channel.receive()
        if message is not None and message[0] == "preempt":
            getattr(self.preemption, message[1])(*message[2:])
            return True
        if message is not None and message[0] == "train":  # before the task is loaded, which may take its time
            self.preemption = Preemption(message[2], self._channel.send_event)
        self.commands.put(message)
        return message is not None

    def _on_sigterm(self) -> None:
        """Has the train function end in order if it can; otherwise ends this process, as the signal would have."""
        watched = self.preemption is not None and self.preemption.is_watched
        if self.preemption is not None:
            with contextlib.suppress(OSError):
                self.preemption.tell(Noticed(self.preemption.rank, watched))
        if not watched:
            os.kill(os.getpid(), signal.SIGKILL)


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
        settle_output: see :func:`serve`.
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


def _call(payload: bytes) -> tuple[bool, bytes]:
    try:
        function, arguments = pickle.loads(payload)
        return True, cloudpickle.dumps(function(*arguments))
    except Exception as error:
        return False, capture_failure(error)


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
