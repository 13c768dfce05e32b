"""The base class of groups whose workers are separate processes, each connected to the controller."""

from __future__ import annotations

import contextlib
import pickle
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from drivetrain._base.console import Console
from drivetrain._base.failure import describe_exit, rebuild_exception, set_rank
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.script import dumps_to_worker
from drivetrain._base.wakeup import HasDescriptor, Wakeup
from drivetrain._hooks.context import WorkerInfo
from drivetrain._runtimes.base import GroupSpec
from drivetrain._runtimes.output import LineEcho
from drivetrain._wire.commands import Call, Command, CountSteps, FreeMemory, JoinRun, RunningTaskCommand, Train
from drivetrain._wire.events import Draining, Event, Exited, Reported, Returned
from drivetrain._wire.frames import Inbox, as_event, frame, sealed
from drivetrain._wire.task import TrainTask
from drivetrain._worker.joining import update_environment
from drivetrain.errors import FailureKind, WaitTimeoutError, WorkerDiedError

__all__ = ["ConnectedGroup"]

T = TypeVar("T")

_COALESCE_S = 0.02
_MAX_COALESCED = 64
_REUSE_WAIT_S = 10.0


class _Coalescing:
    """Decides whether the driver ignores the connections to workers for a moment, because reports are frequent."""

    def __init__(self) -> None:
        self.is_due = False
        self._reported_at = 0.0

    def note(self, events: Collection[Event]) -> None:
        """Record the events that have just arrived together."""
        if events and all(type(event) is Reported for event in events):
            now = time.monotonic()
            self.is_due = len(events) <= _MAX_COALESCED and now - self._reported_at < _COALESCE_S
            self._reported_at = now


class Connections:
    """Sends commands to workers, and receives their events, results and output. A single thread waits for all of them.

    Args:
        on_closed: called with the rank of a worker that has closed its connection.

    Attributes:
        events: the events that were received, and are not delivered yet.
        results: by rank, the response to a command: whether it succeeded, and the pickled result or the error.
        busy: the ranks that run the train function, or another function that was requested.
    """

    def __init__(self, on_closed: Callable[[int], None]) -> None:
        self._on_closed = on_closed
        self._all = selectors.DefaultSelector()
        self._urgent = selectors.DefaultSelector()  # everything except the connections to workers
        self._coalescing = _Coalescing()
        self._inboxes: dict[int, Inbox] = {}
        self._echoes: dict[int, LineEcho] = {}
        self.events: deque[Event] = deque()
        self.results: dict[int, tuple[bool, bytes]] = {}
        self.busy: set[int] = set()

    def watch(self, source: HasDescriptor | int, handle: Callable[[], object]) -> None:
        """Call a function whenever a descriptor is readable."""
        for selector in (self._all, self._urgent):
            selector.register(source, selectors.EVENT_READ, handle)

    def forget(self, source: HasDescriptor | int) -> None:
        """Stop watching a descriptor."""
        for selector in (self._all, self._urgent):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(source)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Add the controller's end of the connection to a worker."""
        inbox = self._inboxes[rank] = Inbox(connection)
        self._all.register(connection, selectors.EVENT_READ, lambda: self._read(rank, inbox))

    def remove(self, rank: int) -> None:
        """Close the connection to a worker that has exited."""
        self._inboxes.pop(rank).socket.close()

    def show_output(self, rank: int, console: Console) -> None:
        """Show the output that a worker sends."""
        self._echoes[rank] = LineEcho(rank, console)

    def finish_output(self) -> None:
        """Show the last lines of the output, which may have no newline."""
        for echo in self._echoes.values():
            echo.finish()

    def send(self, rank: int, data: bytes, deadline: float) -> None:
        """Send a command. Give up if the worker has exited, or does not receive data before the deadline.

        The caller notices such a failure while it waits for the response.

        Args:
            rank: the rank of the worker.
            data: the encoded command.
            deadline: the time on the monotonic clock.
        """
        connection = self._inboxes[rank].socket
        writable = select.poll()
        writable.register(connection, select.POLLOUT)
        with contextlib.suppress(OSError):
            if not writable.poll(1000 * max(0.0, deadline - time.monotonic())):
                return  # a code must not be computed for a message that is not sent
            remaining = memoryview(sealed(connection, data))
            while remaining and writable.poll(1000 * max(0.0, deadline - time.monotonic())):
                remaining = remaining[connection.send(remaining) :]

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until descriptors are readable, and call their functions. Return False if the timeout passed first."""
        return _select(self._all, timeout_s)

    def wait_for_events(self, timeout_s: float | None) -> None:
        """Wait until there are events, unless another descriptor is readable first or the timeout passes.

        Waking the waiting driver costs a rank more time than the rest of a report. Therefore, if reports arrive less
        than 20 ms apart, this method ignores the connections to workers for 20 ms after a batch of only a few reports,
        like the interrupt coalescing of network cards, and waits for the other descriptors only. During this time,
        reports do not wake the driver.
        """
        if self._coalescing.is_due:
            self._coalescing.is_due = False
            # An interrupt or an exit ends the pause.
            if _select(self._urgent, _COALESCE_S if timeout_s is None else min(_COALESCE_S, timeout_s)):
                return
        if not self.events:  # a wait for a result, or an exit, may have received events before this call
            self.wait(timeout_s)
        self._coalescing.note(self.events)

    def read_rest(self, rank: int) -> None:
        """Receive the remaining messages of a worker whose process has exited."""
        if (inbox := self._inboxes.get(rank)) is not None:
            self.forget(inbox.socket)
            self._take(rank, list(inbox.read_rest()))

    def end_commands(self) -> None:
        """Tell all workers that no more commands follow, so that they exit once their functions have returned."""
        for inbox in self._inboxes.values():
            with contextlib.suppress(OSError):
                inbox.socket.shutdown(socket.SHUT_WR)

    def wait_until_closed(self, seconds: float) -> None:
        """Wait until the other end of every connection is closed. The kernel closes that end when the process exits."""
        deadline = time.monotonic() + seconds
        for inbox in self._inboxes.values():
            readable = select.poll()
            readable.register(inbox.socket, select.POLLIN)
            while not inbox.closed and readable.poll(1000 * max(0.0, deadline - time.monotonic())):
                deque(inbox.read(), maxlen=0)

    def close(self) -> None:
        """Close the selectors and all connections."""
        self.finish_output()
        for inbox in self._inboxes.values():
            inbox.socket.close()
        self._all.close()
        self._urgent.close()

    def _read(self, rank: int, inbox: Inbox) -> None:
        self._take(rank, inbox.read())
        if inbox.closed:
            self.forget(inbox.socket)
            self._on_closed(rank)

    def _take(self, rank: int, messages: Iterable[Any]) -> None:
        for message in messages:
            event = as_event(message)
            if event is not None:
                self.events.append(event)
                if type(event) is Returned and not event.unfinished:  # otherwise, it may be terminated soon
                    self.busy.discard(rank)
            elif message[0] == "output":
                self._echoes[rank].feed(message[1])
            else:
                self.results[rank] = message[1:]


def _select(selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
    ready = selector.select(timeout_s)
    for key, _ in ready:
        key.data()
    return bool(ready)


class ConnectedGroup:
    """A group of workers that are separate processes, each with a connection to the driver.

    A runtime derives its group class from this class. The derived class adds the workers, registers further descriptors
    to wait for with :meth:`watch`, and calls :meth:`note_exit` when a process has exited.

    Args:
        deadline: the time on the monotonic clock by which every worker must be running the train function.
        interrupts: requests to end the run, which come from signals or from other threads.
    """

    def __init__(self, deadline: float, interrupts: Interrupts) -> None:
        self.workers: Sequence[WorkerInfo] = ()
        self._deadline = deadline
        self._connections = Connections(self.connection_closed)
        self._exited: dict[int, Exited] = {}
        self._interrupts = interrupts
        self.watch(interrupts.fileno(), interrupts.act)

    def watch(self, source: HasDescriptor | int, handle: Callable[[], object]) -> None:
        """While the group waits, call a function whenever a descriptor is readable."""
        self._connections.watch(source, handle)

    def forget(self, source: HasDescriptor | int) -> None:
        """Stop watching a descriptor."""
        self._connections.forget(source)

    def add_connection(self, rank: int, connection: socket.socket) -> None:
        """Add the controller's end of the connection to a worker."""
        self._connections.add(rank, connection)

    def show_output(self, rank: int, console: Console) -> None:
        """Show the output that a worker sends over its connection."""
        self._connections.show_output(rank, console)

    def reduce(self, value: Any) -> Any:
        """See :meth:`drivetrain.plugin.Runtime.reduce`."""
        return NotImplemented

    def has_exited(self, rank: int) -> bool:
        """Return True if :meth:`note_exit` was called for a rank."""
        return rank in self._exited

    def handle_ready(self, timeout_s: float | None) -> bool:
        """Wait until a descriptor is readable, and call its function. Return False if the timeout passed first."""
        return self._connections.wait(timeout_s)

    def note_exit(
        self, rank: int, exit_code: int | None, reason: str = "", kind: FailureKind = FailureKind.INFRASTRUCTURE
    ) -> None:
        """Receive the remaining messages of a worker whose process has exited, and record the exit."""
        if rank in self._exited:
            return
        self._connections.read_rest(rank)
        self._exited[rank] = event = Exited(rank, exit_code, reason, kind)
        self._connections.events.append(event)

    def note_draining(self, ranks: Sequence[int], deadline: float | None, reason: str) -> None:
        """Report that the nodes of ranks will be terminated, so that the ranks are asked to save.

        Args:
            ranks: the ranks.
            deadline: the Unix time in seconds of the termination; None if it is unknown.
            reason: the reason, for :attr:`drivetrain.PreemptionInfo.reason`.
        """
        self._connections.events.append(Draining(tuple(sorted(ranks)), deadline, reason))

    def run(self, fn: Callable[..., T], /, *args: Any, ranks: Sequence[int] | None = None) -> list[T]:
        """See :meth:`drivetrain.plugin.backends.WorkerGroup.run`."""
        selected = range(len(self.workers)) if ranks is None else ranks
        return self.run_each(fn, dict.fromkeys(selected, args))

    def run_each(self, fn: Callable[..., T], arguments: Mapping[int, tuple[Any, ...]]) -> list[T]:
        """Call a function like :meth:`run`, but with separate arguments for each rank."""
        calls = {rank: Call(dumps_to_worker((fn, args), self.reduce)) for rank, args in arguments.items()}
        return self._request(calls, f"run {getattr(fn, '__qualname__', repr(fn))}")

    def set_environment(self, variables: Mapping[int, Mapping[str, str]]) -> None:
        """See :meth:`drivetrain.plugin.Group.set_environment`."""
        self.run_each(update_environment, {rank: (dict(values),) for rank, values in variables.items()})

    def join_run(self, commands: Mapping[int, JoinRun]) -> list[bool]:
        """Make workers join a run. Return, for each worker, True if its modules are out of date."""
        return self._request(commands, "join the run")

    def _request(self, commands: Mapping[int, Command], action: str) -> list[Any]:
        """Send each rank a command, wait for the results, and return them in the order of the commands.

        Raises:
            WorkerDiedError: a worker exited before it responded.
            WaitTimeoutError: the deadline for the start passed.
        """
        connections = self._connections
        connections.results.clear()
        outcomes: dict[int, tuple[bool, bytes]] = {}
        awaited = set(commands)
        connections.busy |= awaited
        for rank, command in commands.items():
            self._send(rank, frame(command))
        while awaited:
            for rank in self._exited.keys() & awaited:
                exited = self._exited[rank]
                raise WorkerDiedError(
                    f"[DT-501] the worker of rank {rank} could not {action}: it "
                    f"{exited.reason or describe_exit(exited.exit_code)}",
                    rank=rank,
                    exit_code=exited.exit_code,
                )
            self.wait(f"ranks {{ranks}} to {action}", awaited)
            while connections.results:
                rank, outcomes[rank] = connections.results.popitem()
                awaited.discard(rank)
                connections.busy.discard(rank)
        for rank in commands:
            succeeded, data = outcomes[rank]
            if not succeeded:
                error = rebuild_exception(data)
                set_rank(error, rank)
                raise error
        return [pickle.loads(outcomes[rank][1]) for rank in commands]

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """See :meth:`drivetrain.plugin.Group.train`."""
        for task in tasks:
            rank = task.context.get_world_rank()
            self._connections.busy.add(rank)
            self._send(rank, frame(Train(rank, dumps_to_worker(task, self.reduce), task.options.progress_interval_s)))
        self.training_started()

    def training_started(self) -> None:
        """Called when the tasks have been sent. A subclass may override this method."""

    @contextlib.contextmanager
    def woken_by(self, future: Future[Any]) -> Iterator[None]:
        """See :meth:`drivetrain.plugin.Group.woken_by`."""
        wakeup = Wakeup()
        self.watch(wakeup, lambda: self.forget(wakeup))
        future.add_done_callback(lambda _: wakeup.wake())
        try:
            yield
        finally:
            self.forget(wakeup)
            wakeup.close()

    def restart_deadline(self, seconds: float) -> None:
        """Set a new deadline for starting the train function: a number of seconds from now."""
        self._deadline = time.monotonic() + seconds

    def forget_rank(self, rank: int) -> None:
        """Remove a process that has exited, so that a new one can replace it."""
        del self._exited[rank]
        self._connections.remove(rank)

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """See :meth:`drivetrain.plugin.Group.send`."""
        if isinstance(command, CountSteps):
            self.stop_requested()
        data = frame(command)
        for rank in ranks:
            self._send(rank, data)

    def stop_requested(self) -> None:
        """Called when the ranks are requested to save and return early. A subclass may override this method."""

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """See :meth:`drivetrain.plugin.Group.pump`."""
        self._connections.wait_for_events(timeout_s)
        events = self._connections.events
        while events:
            if deliver(events.popleft()):  # the attempt is over, and the rest stays for the next call
                return

    def park(self) -> bool:
        """See :meth:`drivetrain.plugin.Group.park`."""
        self.ignore_interrupts()
        self._connections.finish_output()
        if self._connections.busy or self._exited:
            return False
        for rank in range(len(self.workers)):
            self._send(rank, frame(FreeMemory()))
        return True

    def reuse(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.Group.reuse`."""
        self._connections.wait(0)  # notices processes that have exited since park()
        if self._exited:
            return False
        self._connections.events.clear()
        self._interrupts = spec.interrupts
        self.watch(spec.interrupts.fileno(), spec.interrupts.act)
        started = time.monotonic()
        self._deadline = started + min(_REUSE_WAIT_S, spec.start_timeout_s)
        try:
            if any(self.join_next_run(spec)):
                return False
        except (WorkerDiedError, WaitTimeoutError):
            return False
        self._deadline = started + spec.start_timeout_s
        return True

    def join_next_run(self, spec: GroupSpec) -> Sequence[bool]:
        """Make the workers join another run. Return, for each worker, True if its modules are out of date."""
        raise NotImplementedError

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline for starting the train function; 0 if it has passed."""
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, awaited: str, ranks: Collection[int]) -> None:
        """Wait during the group's start until a descriptor is readable, and call its function.

        Args:
            awaited: a description of the awaited event for the error message. ``{ranks}`` stands for the ranks, as in
                ``ranks {ranks} to connect``.
            ranks: the awaited ranks.

        Raises:
            WaitTimeoutError: the deadline for the start has passed.
        """
        remaining = self.remaining_s
        if remaining <= 0:
            numbers = sorted(ranks)
            stacks = self.stacks(numbers)
            listed = "".join(f"\n\nstack of rank {rank}:\n{stack}" for rank, stack in sorted(stacks.items()))
            raise WaitTimeoutError(
                "[DT-303] the workers did not start within RunConfig.start_timeout_s; still waiting for "
                f"{awaited.replace('{ranks}', str(numbers))}{listed}",
                ranks=numbers,
            )
        self._connections.wait(remaining)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.Group.stacks`."""
        return {}

    def let_exit(self) -> bool:
        """If the functions of all ranks have returned, ask the processes to exit. Return True if they will.

        A process then joins its threads, runs its exit handlers and flushes its files, within ``EXIT_LIMIT_S``.
        """
        if self._connections.busy or self._exited or not self.workers:
            return False
        self._connections.end_commands()
        return True

    def ignore_interrupts(self) -> None:
        """Ignore further requests to end the run, so that they do not interrupt the shutdown of the group."""
        self.forget(self._interrupts.fileno())

    def wait_for_closed_connections(self, seconds: float) -> None:
        """Wait until the other end of every connection is closed. The kernel closes that end when the process exits."""
        self._connections.wait_until_closed(seconds)

    def close_connections(self) -> None:
        """Close the selectors and all connections."""
        self._connections.close()

    def _send(self, rank: int, data: bytes) -> None:
        self._connections.send(rank, data, self._deadline)

    def connection_closed(self, rank: int) -> None:
        """Called when a worker has closed its connection. A subclass may check whether the process has exited."""
