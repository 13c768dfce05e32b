"""How the runtime ``command`` records the exits of many workers at once. The supervisors are fakes of this process."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivetrain import FailureKind
from drivetrain._wire.events import Exited
from drivetrain_launch import _group as module
from drivetrain_launch._group import CommandGroup
from drivetrain_launch._launch import Launch
from drivetrain_launch._supervisor import WorkerExited
from tests.groups import group_spec


class Supervisors:
    """Replaces a launch. The supervisors report the exits of all workers together."""

    def __init__(self, count: int) -> None:
        self.supervisors = {
            index: SimpleNamespace(exited=None, is_lost=False, is_terminating=False) for index in range(count)
        }
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._changes: dict[str, Any] = {}

    def fileno(self) -> int:
        return self._ours.fileno()

    def report(self, **changes: Any) -> None:
        """Report changes of all supervisors, which the next call of `handle` notices."""
        self._changes = changes
        self._theirs.send(b"\n")

    def handle(self) -> None:
        try:
            self._ours.recv(1)
        except BlockingIOError:  # a nested wait has handled it
            return
        for supervisor in self.supervisors.values():
            vars(supervisor).update(self._changes)

    def has_command_exited(self, index: int) -> bool:
        return False

    def describe(self, index: int) -> str:
        return f"the command of worker {index} is running"

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Workers:
    """A group whose workers are the other ends of its connections."""

    def __init__(self, count: int, resources: ExitStack) -> None:
        spec = group_spec(count, resources)
        self.launch = Supervisors(count)
        resources.callback(self.launch.close)
        self.group = CommandGroup(spec, 0.0, cast(Launch, self.launch))
        resources.callback(self.group.close_connections)
        self.group.watch(self.launch.fileno(), self.group._on_launch)
        self._connections = []
        for index in range(count):
            ours, theirs = socket.socketpair()
            resources.callback(theirs.close)
            self._connections.append(theirs)
            self.group.rank_of[index] = index
            self.group.add_connection(index, ours)

    def close_connections(self) -> None:
        for connection in self._connections:
            connection.close()

    def exits(self) -> dict[int, Exited]:
        events: list[Any] = []
        self.group.pump(lambda event: events.append(event) is not None, 60)
        assert all(isinstance(event, Exited) for event in events)
        assert len({event.rank for event in events}) == len(events)
        return {event.rank: event for event in events}


@pytest.fixture
def start() -> Iterator[Callable[[int], Workers]]:
    with ExitStack() as resources:
        yield lambda count: Workers(count, resources)


def test_hundreds_of_ranks_exit_together(start: Callable[[int], Workers]) -> None:
    workers = start(300)
    workers.close_connections()
    workers.launch.report(exited=WorkerExited(-9, "", FailureKind.INFRASTRUCTURE))

    exits = workers.exits()

    assert sorted(exits) == list(range(300))
    assert {exited.exit_code for exited in exits.values()} == {-9}


@pytest.mark.parametrize(
    ("closed", "lost", "waited_s", "reason"),
    [
        (False, True, 4.0, "was lost"),  # a lost machine closes no connection
        (True, True, 1.0, "was lost"),
        (True, False, 4.0, "closed its connection"),
    ],
)
def test_driver_waits_for_all_lost_ranks_together(
    start: Callable[[int], Workers],
    monkeypatch: pytest.MonkeyPatch,
    closed: bool,
    lost: bool,
    waited_s: float,
    reason: str,
) -> None:
    workers = start(8)
    clock = SimpleNamespace(now=0.0)
    wait = workers.group.handle_ready

    def pass_time(timeout_s: float | None) -> bool:
        """Let the time pass at once if no descriptor is readable."""
        assert timeout_s is not None
        if wait(0):
            return True
        clock.now += timeout_s
        return False

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(workers.group, "handle_ready", pass_time)
    if closed:
        workers.close_connections()
    if lost:
        workers.launch.report(is_lost=True)

    exits = workers.exits()

    assert sorted(exits) == list(range(8))
    assert all(exited.reason.startswith(reason) for exited in exits.values())
    assert clock.now == waited_s
