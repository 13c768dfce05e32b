"""The base of groups whose workers are other processes, each at the end of a connection."""

from __future__ import annotations

import contextlib
import pickle
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from drivetrain._base.console import Console
from drivetrain._base.failure import describe_exit, rebuild_exception
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.pickling import dumps
from drivetrain._hooks.context import WorkerInfo
from drivetrain._runtimes.base import GroupSpec
from drivetrain._wire.commands import Call, Command, CountSteps, FreeMemory, JoinRun, RunningTaskCommand, Train
from drivetrain._wire.events import Event, Exited, Reported, Returned
from drivetrain._wire.frames import Inbox, as_event, frame
from drivetrain._wire.task import TrainTask
from drivetrain._worker.output import LineEcho
from drivetrain.errors import FailureKind, WaitTimeoutError, WorkerDiedError

__all__ = ["ConnectedGroup"]

T = TypeVar("T")

_REST_S = 0.02
_FEW = 64
_RENEW_WAIT_S = 10.0


class ConnectedGroup:
    """Commands go down each worker's line, events and results come up; one thread waits for all of them at once.

    A runtime derives from it, adds the workers, registers what else there is to wait for with :meth:`watch`, and
    calls :meth:`note_exit` when it learns that a process is gone.

    Args:
        deadline: when, by the monotonic clock, every worker must be running the train function.
        interrupts: what ends the run from outside.
    """

    def __init__(self, deadline: float, interrupts: Interrupts) -> None:
        self.workers: Sequence[WorkerInfo] = ()
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._urgent = selectors.DefaultSelector()  # all but the lines
        self._resting = False
        self._inboxes: dict[int, Inbox] = {}
        self._results: dict[int, tuple[bool, bytes]] = {}
        self._events: deque[Event] = deque()
        self._gone: dict[int, Exited] = {}
        self._echoes: dict[int, LineEcho] = {}
        self._interrupts = interrupts
        self._training: set[int] = set()
        self.watch(interrupts.fileno(), interrupts.act)

    def watch(self, source: socket.socket | int, handle: Callable[[], object]) -> None:
        """Has :meth:`pump` call a function whenever a descriptor can be read."""
        for selector in (self._selector, self._urgent):
            selector.register(source, selectors.EVENT_READ, handle)

    def forget(self, source: socket.socket | int) -> None:
        """Ends :meth:`watch`."""
        for selector in (self._selector, self._urgent):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(source)

    def add_line(self, rank: int, connection: socket.socket) -> None:
        """Takes the controller's end of a worker's line."""
        inbox = self._inboxes[rank] = Inbox(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(rank, inbox))

    def show_output(self, rank: int, console: Console) -> None:
        """Has the output that a worker sends over its line shown."""
        self._echoes[rank] = LineEcho(rank, console)

    def reduce(self, value: Any) -> Any:
        """See :meth:`drivetrain.plugin.Runtime.reduce`."""
        return NotImplemented

    def has_exited(self, rank: int) -> bool:
        """Whether :meth:`note_exit` was called for a rank."""
        return rank in self._gone

    def handle_ready(self, timeout_s: float | None) -> bool:
        """Waits for a watched descriptor and handles it; False if the time was over first."""
        return self._select(self._selector, timeout_s)

    def note_exit(
        self, rank: int, exit_code: int | None, reason: str = "", kind: FailureKind = FailureKind.INFRASTRUCTURE
    ) -> None:
        """Notes that a worker's process is gone, after taking what it said before."""
        if rank in self._gone:
            return
        if (inbox := self._inboxes.get(rank)) is not None:
            self.forget(inbox.socket)
            self._take(rank, list(inbox.read_rest()))
        self._gone[rank] = event = Exited(rank, exit_code, reason, kind)
        self._events.append(event)

    def run(self, fn: Callable[..., T], /, *args: Any, ranks: Sequence[int] | None = None) -> list[T]:
        """See :meth:`drivetrain.WorkerGroup.run`."""
        chosen = range(len(self.workers)) if ranks is None else ranks
        return self.run_each(fn, dict.fromkeys(chosen, args))

    def run_each(self, fn: Callable[..., T], arguments: Mapping[int, tuple[Any, ...]]) -> list[T]:
        """Like :meth:`run`, with arguments of its own for each rank."""
        calls = {rank: Call(dumps((fn, own), self.reduce)) for rank, own in arguments.items()}
        return self._request(calls, f"run {getattr(fn, '__qualname__', repr(fn))}")

    def join_run(self, commands: Mapping[int, JoinRun]) -> list[bool]:
        """Makes workers join a run, and returns whether each one uses modules that are out of date."""
        return self._request(commands, "join the run")

    def _request(self, commands: Mapping[int, Command], action: str) -> list[Any]:
        """Sends each rank a command, waits for the results, and returns them in the order of the commands.

        Raises:
            WorkerDiedError: a worker exited before.
            WaitTimeoutError: the time for the start is over.
        """
        self._results.clear()
        for rank, command in commands.items():
            self._send(rank, frame(command))
        while missing := [rank for rank in commands if rank not in self._results]:
            for rank in missing:
                if (exited := self._gone.get(rank)) is not None:
                    raise WorkerDiedError(
                        f"the worker of rank {rank} {exited.reason or describe_exit(exited.exit_code)} "
                        f"while it was to {action}",
                        rank=rank,
                        exit_code=exited.exit_code,
                    )
            self.wait(f"ranks {missing} to {action}", missing)
        outcomes = [self._results[rank] for rank in commands]
        for succeeded, data in outcomes:
            if not succeeded:
                raise rebuild_exception(data)
        return [pickle.loads(data) for _, data in outcomes]

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """See :meth:`drivetrain.plugin.Group.train`."""
        for task in tasks:
            rank = task.context.get_world_rank()
            self._training.add(rank)
            self._send(rank, frame(Train(rank, dumps(task, self.reduce))))
        self.training_started()

    def training_started(self) -> None:
        """Called when the ranks have their tasks. A runtime may override it."""

    @contextlib.contextmanager
    def woken_by(self, future: Future[Any]) -> Iterator[None]:
        """See :meth:`drivetrain.plugin.Group.woken_by`."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.watch(ours, lambda: self.forget(ours))
            future.add_done_callback(lambda _: theirs.close())
            try:
                yield
            finally:
                self.forget(ours)

    def restart_deadline(self, seconds: float) -> None:
        """Gives workers a number of seconds from now to start the train function."""
        self._deadline = time.monotonic() + seconds

    def forget_rank(self, rank: int) -> None:
        """Makes room for a new process in the place of one that is gone."""
        del self._gone[rank]
        self._inboxes.pop(rank).socket.close()

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """See :meth:`drivetrain.plugin.Group.send`."""
        if isinstance(command, CountSteps):
            self.stop_requested()
        data = frame(command)
        for rank in ranks:
            self._send(rank, data)

    def stop_requested(self) -> None:
        """Called when the ranks are asked to save and return early. A runtime may override it."""

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """See :meth:`drivetrain.plugin.Group.pump`.

        Waking a process that waits costs whoever wakes it more than a report costs otherwise. After a few reports, and
        nothing else, the lines are therefore left alone for 20 ms, as network cards do with packets, and
        only the other descriptors are waited for: a rank that reports often wakes nobody up.
        """
        if self._resting:
            self._resting = False
            if self._select(self._urgent, _REST_S if timeout_s is None else min(_REST_S, timeout_s)):
                return
        if not self._events:
            self._select(self._selector, timeout_s)
        self._resting = 0 < len(self._events) <= _FEW and all(type(event) is Reported for event in self._events)
        while self._events:
            if deliver(self._events.popleft()):
                return

    def rest(self) -> bool:
        """See :meth:`drivetrain.plugin.Group.rest`."""
        self.ignore_interrupts()
        for echo in self._echoes.values():
            echo.finish()
        if self._training or self._gone:
            return False
        for rank in range(len(self.workers)):
            self._send(rank, frame(FreeMemory()))
        return True

    def renew(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.Group.renew`."""
        self._select(self._selector, 0)  # the end of a process would be heard of now
        if self._gone:
            return False
        self._events.clear()
        self._interrupts = spec.interrupts
        self.watch(spec.interrupts.fileno(), spec.interrupts.act)
        started = time.monotonic()
        self._deadline = started + min(_RENEW_WAIT_S, spec.start_timeout_s)
        try:
            if any(self.join_next_run(spec)):
                return False
        except (WorkerDiedError, WaitTimeoutError):
            return False
        self._deadline = started + spec.start_timeout_s
        return True

    def join_next_run(self, spec: GroupSpec) -> Sequence[bool]:
        """Makes the workers join another run, and returns whether each one uses modules that are out of date."""
        raise NotImplementedError

    def wait(self, what: str, ranks: Sequence[int]) -> None:
        """Waits until anything happens, as part of the group's start.

        Raises:
            WaitTimeoutError: the time for the start is over.
        """
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            stacks = self.stacks(ranks)
            shown = "".join(f"\n\nrank {rank} is at:\n{stack}" for rank, stack in sorted(stacks.items()))
            raise WaitTimeoutError(
                f"the time for the start of the workers (RunConfig.start_timeout_s) is over, waiting for {what}{shown}",
                ranks=ranks,
            )
        self._select(self._selector, remaining)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.Group.stacks`."""
        return {}

    def ignore_interrupts(self) -> None:
        """Has the end of the group not be ended itself."""
        self.forget(self._interrupts.fileno())

    def await_closed_lines(self, seconds: float) -> None:
        """Waits until every worker's end of its line is closed: the kernel does it when the process is no more."""
        deadline = time.monotonic() + seconds
        for inbox in self._inboxes.values():
            readable = select.poll()
            readable.register(inbox.socket, select.POLLIN)
            while not inbox.closed and readable.poll(1000 * max(0.0, deadline - time.monotonic())):
                deque(inbox.read(), maxlen=0)

    def close_lines(self) -> None:
        """Closes the selector and every line."""
        for echo in self._echoes.values():
            echo.finish()
        for inbox in self._inboxes.values():
            inbox.socket.close()
        self._selector.close()
        self._urgent.close()

    @staticmethod
    def _select(selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
        """Handles what can be read; False when the time was over first."""
        ready = selector.select(timeout_s)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _send(self, rank: int, data: bytes) -> None:
        """Sends a command, and gives up on a worker that is gone or that takes nothing until it should be training.

        Whoever waits for what it should have answered notices.
        """
        connection = self._inboxes[rank].socket
        writable = select.poll()
        writable.register(connection, select.POLLOUT)
        rest = memoryview(data)
        with contextlib.suppress(OSError):
            while rest and writable.poll(1000 * max(0.0, self._deadline - time.monotonic())):
                rest = rest[connection.send(rest) :]

    def _read(self, rank: int, inbox: Inbox) -> None:
        self._take(rank, inbox.read())
        if inbox.closed:
            self.forget(inbox.socket)
            self.line_closed(rank)

    def line_closed(self, rank: int) -> None:
        """A worker's line is closed; its process may be gone, which the runtime finds out."""

    def _take(self, rank: int, messages: Any) -> None:
        for message in messages:
            event = as_event(message)
            if event is not None:
                self._events.append(event)
                if type(event) is Returned and not event.preempted:  # its process may be about to end
                    self._training.discard(rank)
            elif message[0] == "output":
                self._echoes[rank].feed(message[1])
            else:
                self._results[rank] = message[1:]
