"""The main function of a worker process, for all runtimes that start processes.

The main thread runs train functions and other calls. Another thread receives the driver's commands.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from drivetrain._base.failure import capture_failure
from drivetrain._base.script import dumps_to_driver, forget_script
from drivetrain._plugins.frameworks import load_frameworks, reseed
from drivetrain._wire.commands import (
    Call,
    Command,
    CommitState,
    CountSteps,
    FreeMemory,
    Interrupt,
    JoinRun,
    Refuse,
    Renumber,
    RunningTaskCommand,
    StopAfter,
    StoreApart,
    Train,
)
from drivetrain._wire.events import Failed, Progressed, RankState, SigtermReceived
from drivetrain._wire.frames import Channel
from drivetrain._wire.handshake import DriverAddress, connect_to_driver
from drivetrain._worker.execute import RunningTask, report_outcome, run_in_session
from drivetrain._worker.joining import join_run
from drivetrain._worker.leaving import ExitHandlers, finish_process
from drivetrain._worker.output import WorkerOutput
from drivetrain._worker.session import Outbox
from drivetrain._worker.signals import Signals
from drivetrain._worker.stacks import dump_stacks_on_signal
from drivetrain.errors import ConfigurationError

__all__ = ["notify", "serve", "worker_main"]

_ORPHAN_LIMIT_S = 5.0
"""Seconds for which the main thread may continue after the driver has closed the connection."""


def worker_main(
    address: DriverAddress,
    index: int,
    *,
    node_id: str | None = None,
    ip: str | None = None,
    details: Any = None,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Connect to the driver, and perform its commands until it closes the connection. Then finish the process.

    This is the main function of a worker process. Call it on the main thread. Before it returns, it joins threads, runs
    the exit handlers that were registered in the meantime, and writes buffered output to files. The process should then
    exit.

    Args:
        address: the driver's address, from :class:`~drivetrain.plugin.runtimes.WorkerListener`.
        index: the number that the runtime gave this process.
        node_id: the id of this node; None for the host name.
        ip: the IP address of this node; None for the local address of the connection to the driver.
        details: an object for the runtime, which receives it as ``Introduction.details``.
        preload: names of modules to import before the first command.
        environment: environment variables to set before these modules are imported.

    Raises:
        ConnectionError: the driver is unreachable.
        ConfigurationError: the driver refuses this process, because it has another version of drivetrain or Python
            than the driver, or ``details`` are too large.
    """
    stacks, write_end = os.pipe()
    dump_stacks_on_signal(write_end)
    connection = connect_to_driver(address, index, node_id=node_id, ip=ip, details=details, stacks=stacks)
    # Otherwise, the driver would not notice the exit of this process while a process that it has forked is running.
    os.register_at_fork(after_in_child=connection.close)
    os.environ.update(environment)
    _preload(preload)
    handlers = ExitHandlers()
    with connection:  # the driver waits until it is closed
        serve(Channel(connection))
        finish_process(handlers)
        with contextlib.suppress(OSError):  # native code may have forked a process, which has the connection open too
            connection.shutdown(socket.SHUT_RDWR)


def serve(channel: Channel) -> None:
    """Perform the driver's commands until the connection closes. Call it on the main thread.

    Another thread receives the commands, so that the train function can be notified while it runs. A process may run
    one train function after another. If the connection closes because the driver was killed, a train function that
    still runs has no purpose: the process is killed after a few seconds.

    Raises:
        ConfigurationError: the driver refuses this process.
    """
    signals = Signals()
    listener = _Listener(channel, signals)
    with signals.watched():
        threading.Thread(target=listener.run, daemon=True, name="drivetrain commands").start()
        while (perform := listener.for_main_thread.get()) is not None:
            perform()
        listener.main_thread_left.set()
    if listener.refusal is not None:
        raise ConfigurationError(listener.refusal)


def _preload(names: Sequence[str]) -> None:
    """Import modules with garbage collection disabled, which saves a fifth of the time."""
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):  # the backend's setup will raise and report the same error
            importlib.import_module(name)
    gc.freeze()  # later collections skip the objects of the modules
    gc.enable()


class _Listener:
    """Receives commands and signals for a worker process."""

    def __init__(self, channel: Channel, signals: Signals) -> None:
        self.for_main_thread: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.main_thread_left = threading.Event()
        self.refusal: str | None = None
        self._running: RunningTask | None = None
        self._channel = channel
        self._signals = signals
        self._output = WorkerOutput(channel.send)
        self._progress_interval_ms: float | None = None
        self._sent_progress = 0
        self._has_trained = False

    def run(self) -> None:
        """Receive commands and signals until the connection closes, and then make :func:`serve` return."""
        poller = select.poll()
        for source in (self._channel, self._signals):
            poller.register(source, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poller.poll(self._progress_interval_ms)}
                if not ready:
                    self._send_progress()
                if self._signals.fileno() in ready and self._signals.take():
                    self._on_sigterm()
                if self._channel.fileno() in ready:
                    command = self._receive()
                    if command is None:
                        self._end_without_driver()
                        return
                    self._dispatch(command)
        finally:
            self.for_main_thread.put(None)

    def _receive(self) -> Command | None:
        """Return the next command; None if the connection is closed, or the machine of the driver was lost."""
        try:
            command: Command | None = self._channel.receive()
        except OSError:
            return None
        return command

    def _end_without_driver(self) -> None:
        """Let the main thread finish its command, and kill this process if that takes too long."""
        self.for_main_thread.put(None)
        if not self.main_thread_left.wait(_ORPHAN_LIMIT_S):
            is_leader = os.getpgrp() == os.getpid()  # of a group that contains only this process and its children
            os.kill(0 if is_leader else os.getpid(), signal.SIGKILL)

    def _dispatch(self, command: Command) -> None:
        """Perform a command, or pass it to the main thread. It and :func:`notify` list all types of commands."""
        match command:
            case Call():
                self.for_main_thread.put(partial(self._respond, partial(_call, command.payload)))
            case JoinRun():
                self.for_main_thread.put(partial(self._respond, partial(join_run, command, self._output)))
            case Train():  # the main thread unpickles the task, so that this thread can receive commands
                self._running = RunningTask(command.rank, Outbox(self._channel.send_event))
                interval_s, self._sent_progress = command.progress_interval_s, 0
                self._progress_interval_ms = None if interval_s is None else 1000 * interval_s
                self.for_main_thread.put(partial(self._train, command, self._running))
            case FreeMemory():
                self.for_main_thread.put(gc.collect)
            case Refuse():
                self.refusal = command.reason
                self.for_main_thread.put(None)
            case _:
                assert self._running is not None
                notify(self._running, command)

    def _send_progress(self) -> None:
        """Notify the driver if the train function has made progress that causes no other event."""
        running = self._running
        if running is not None and not running.is_over and running.progress != self._sent_progress:
            self._sent_progress = running.progress
            running.outbox.emit(Progressed(running.rank))

    def _respond(self, function: Callable[[], Any]) -> None:
        """Call a function, and send its result or its exception."""
        try:
            succeeded, data = True, dumps_to_driver(function())
        except BaseException as error:  # a process that ended here would hide it
            succeeded, data = False, capture_failure(error)
        self._channel.send(("result", succeeded, data))

    def _train(self, command: Train, running: RunningTask) -> None:
        if self._has_trained:  # the generators would continue from what the last train function has set
            load_frameworks()
            reseed()
        self._has_trained = True
        forget_script()  # of the train function that this process ran before
        try:
            task = pickle.loads(command.task)
        except BaseException as error:  # for example, the task needs a package that this node does not have
            running.outbox.emit(Failed(command.rank, time.time(), RankState.LOADING, capture_failure(error)))
        else:
            self._channel.share_among(task.context.get_world_size())
            report_outcome(run_in_session(task, running), task, running, self._output.flush)
        running.is_over, running.session = True, None

    def _on_sigterm(self) -> None:
        """Notify the driver. Unless the train function can end gracefully, kill this process, as SIGTERM would."""
        graceful = self._running is not None and self._running.can_end_gracefully
        if self._running is not None:
            with contextlib.suppress(OSError):
                self._running.outbox.emit(SigtermReceived(self._running.rank, graceful))
        if not graceful:
            os.kill(os.getpid(), signal.SIGKILL)


def notify(running: RunningTask, command: RunningTaskCommand) -> None:
    """Perform a command that concerns the running train function. Called on a thread other than its own."""
    match command:
        case CountSteps():
            running.preemption.count_steps()
        case StopAfter():
            running.preemption.stop_after(command.step, command.info)
        case Interrupt():
            running.interrupt(command.number)
        case CommitState():
            running.outbox.responses.put(command.number, command)
        case StoreApart():
            running.outbox.responses.put(command.directory, command)
        case Renumber():
            running.renumber(command.last_report)


def _call(payload: bytes) -> Any:
    function, arguments = pickle.loads(payload)
    return function(*arguments)
