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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from drivetrain._base.failure import capture_failure
from drivetrain._wire.events import Noticed
from drivetrain._wire.frames import Channel
from drivetrain._worker.execute import execute, flush_output, redirect_output
from drivetrain._worker.output import open_log
from drivetrain._worker.preemption import Preemption
from drivetrain._worker.signals import Signals

__all__ = ["serve", "settle_in"]

_INSTALLED = ("site-packages", "dist-packages")


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


def _call(payload: bytes) -> tuple[bool, bytes]:
    try:
        function, arguments = pickle.loads(payload)
        return True, cloudpickle.dumps(function(*arguments))
    except Exception as error:
        return False, capture_failure(error)
