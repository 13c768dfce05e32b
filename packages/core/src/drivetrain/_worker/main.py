"""What runs in a worker process, whoever started it: take commands, run the train function on the main thread."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cloudpickle

from drivetrain._base.failure import capture_failure
from drivetrain._wire.commands import Call, Command, FreeMemory, Train
from drivetrain._wire.events import Failed, RankState, SigtermReceived
from drivetrain._wire.frames import Channel
from drivetrain._worker.execute import RunningTask, flush_output, redirect_output, report_outcome, run_in_session
from drivetrain._worker.output import open_log
from drivetrain._worker.session import Outbox
from drivetrain._worker.signals import Signals

__all__ = ["serve", "settle_in"]

_INSTALLED = ("site-packages", "dist-packages")


def serve(channel: Channel, settle_output: Callable[[], None] = flush_output) -> None:
    """Performs commands until the channel closes. Call it on the main thread.

    Another thread receives the commands, so that the train function can be notified while it runs. A process may run
    one train function after another.

    Args:
        channel: where commands come from.
        settle_output: called before the end of the train function is reported, so that its output comes before it.
    """
    signals = Signals()
    listener = _Listener(channel, signals, settle_output)
    with signals.watched():
        threading.Thread(target=listener.run, daemon=True, name="drivetrain commands").start()
        while (perform := listener.for_main_thread.get()) is not None:
            perform()


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
    """Receives commands and signals for a worker process."""

    def __init__(self, channel: Channel, signals: Signals, settle_output: Callable[[], None]) -> None:
        self.for_main_thread: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._running: RunningTask | None = None
        self._channel = channel
        self._signals = signals
        self._settle_output = settle_output

    def run(self) -> None:
        """Returns when the channel closes, and then ends the main thread's wait."""
        poller = select.poll()
        for source in (self._channel, self._signals):
            poller.register(source, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poller.poll()}
                if self._signals.fileno() in ready and self._signals.take():
                    self._on_sigterm()
                if self._channel.fileno() in ready:
                    command: Command | None = self._channel.receive()
                    if command is None:
                        return
                    self._dispatch(command)
        finally:
            self.for_main_thread.put(None)

    def _dispatch(self, command: Command) -> None:
        """Performs a command, or passes it to the main thread; the only place that knows all commands."""
        match command:
            case Call():
                self.for_main_thread.put(partial(self._call, command))
            case Train():  # the task is loaded on the main thread, which may take long: commands can come meanwhile
                self._running = RunningTask(command.rank, Outbox(self._channel.send_event))
                self.for_main_thread.put(partial(self._train, command, self._running))
            case FreeMemory():
                self.for_main_thread.put(gc.collect)
            case _:
                assert self._running is not None
                self._running.perform(command)

    def _call(self, command: Call) -> None:
        self._channel.send(("result", *_call(command.payload)))

    def _train(self, command: Train, running: RunningTask) -> None:
        try:
            task = pickle.loads(command.task)
        except Exception as error:  # a package of the task is missing on this node, for example
            running.outbox.emit(Failed(command.rank, time.time(), RankState.LOADING, capture_failure(error)))
        else:
            report_outcome(run_in_session(task, running), task, running, self._settle_output)
        running.is_over, running.session = True, None

    def _on_sigterm(self) -> None:
        """Notifies the driver; kills this process, as SIGTERM would, unless the train function can end gracefully."""
        graceful = self._running is not None and self._running.can_end_gracefully
        if self._running is not None:
            with contextlib.suppress(OSError):
                self._running.outbox.emit(SigtermReceived(self._running.rank, graceful))
        if not graceful:
            os.kill(os.getpid(), signal.SIGKILL)


def _call(payload: bytes) -> tuple[bool, bytes]:
    try:
        function, arguments = pickle.loads(payload)
        return True, cloudpickle.dumps(function(*arguments))
    except Exception as error:
        return False, capture_failure(error)
