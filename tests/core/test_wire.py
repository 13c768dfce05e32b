import contextlib
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from drivetrain._base.interrupts import Interrupts
from drivetrain._runtimes.connected import ConnectedGroup
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
    StopAfter,
    StoreApart,
    Train,
)
from drivetrain._wire.events import (
    CommitOverdue,
    Event,
    Exited,
    Failed,
    FilesClaimed,
    PhaseEntered,
    Pickled,
    PreemptionInfo,
    RankState,
    Reported,
    ReportNumber,
    Returned,
)
from drivetrain._wire.frames import Channel, Inbox, as_event, frame

EVENTS = [
    PhaseEntered(1, RankState.SETTING_UP, 1.5),
    Reported(0, 3, 2, 2.5, {"loss": 0.5, "nested": [1, {"a": None}]}, {"weights": 3}, {"loss": "mean"}),
    Returned(0, Pickled(b"value")),
    Failed(2, 3.5, RankState.TRAINING, b"error"),
    Exited(3, -9, ""),
    CommitOverdue(1, 3),
    FilesClaimed(1, "checkpoint_000001", ("model.pt",)),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    worker, controller = socket.socketpair()
    with worker, controller:
        yield worker, controller


def test_events_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    channel, inbox = Channel(ends[0]), Inbox(ends[1])
    for event in EVENTS:
        channel.send_event(event)

    received = [as_event(message) for message in inbox.read()]

    assert received == EVENTS
    assert [type(event) for event in received] == [type(event) for event in EVENTS]


def test_result_of_a_call_is_not_an_event() -> None:
    assert as_event(("result", True, b"")) is None


def test_message_received_byte_by_byte_is_delivered_once_complete(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker, inbox = ends[0], Inbox(ends[1])
    data = frame(("one", 1)) + frame(("two", 2))
    received = []
    for place in range(len(data)):
        worker.send(data[place : place + 1])
        received.append(list(inbox.read()))

    first = len(frame(("one", 1))) - 1
    assert received[first] == [("one", 1)]
    assert received[-1] == [("two", 2)]
    assert sum(map(len, received)) == 2


def test_reading_an_empty_connection_neither_blocks_nor_closes_it(ends: tuple[socket.socket, socket.socket]) -> None:
    inbox = Inbox(ends[1])

    assert list(inbox.read()) == []
    assert not inbox.closed


def test_complete_messages_of_a_dead_worker_are_read_and_a_partial_one_is_dropped(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker, inbox = ends[0], Inbox(ends[1])
    worker.sendall(frame("whole") + frame("half")[:-1])
    worker.close()

    assert list(inbox.read_rest()) == ["whole"]
    assert inbox.closed


def test_connection_kept_open_by_a_child_of_the_worker_is_read_without_blocking(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker, inbox = ends[0], Inbox(ends[1])
    for number in range(100):
        worker.sendall(frame(number))

    assert list(inbox.read_rest()) == list(range(100))
    assert not inbox.closed


def connected(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def count_until_blocked(channel: Channel) -> int:
    for number in range(100_000):
        try:
            channel.send_event(Reported(0, number, number, 2.5, {"loss": 0.5}, None, None))
        except TimeoutError:
            return number
    return 100_000


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_rank_is_at_most_some_thousand_reports_ahead_of_the_controller(family: socket.AddressFamily) -> None:
    worker, controller = connected(family)
    with worker, controller:
        channel, _ = Channel(worker), Inbox(controller)
        worker.settimeout(0.5)
        assert 500 < count_until_blocked(channel) < 10_000


def test_message_larger_than_every_buffer_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    channel, inbox = Channel(ends[0]), Inbox(ends[1])
    large = b"x" * (8 << 20)
    sender = threading.Thread(target=channel.send, args=(large,))
    sender.start()
    ends[1].setblocking(True)
    received: list[bytes] = []
    while not received and not inbox.closed:
        ends[1].recv(1, socket.MSG_PEEK)  # blocks until data arrives
        received += inbox.read()
    sender.join()

    assert received == [large]


COMMANDS: list[Command] = [
    Call(b"payload"),
    JoinRun(1, Path("logs"), shown=True, module_path=("src",), environment={"RANK": "1"}, imported_since=2.5),
    Train(1, b"task"),
    FreeMemory(),
    Refuse("another version"),
    CountSteps(),
    Interrupt(2),
    StopAfter(3, PreemptionInfo("maintenance", 1.5)),
    CommitState(3, is_committed=False, missing=(1,)),
    StoreApart("checkpoint_000001", frozenset({"model.pt"})),
    Renumber(ReportNumber(7, 5)),
]


def test_commands_are_received_whole_and_the_end_is_reported(ends: tuple[socket.socket, socket.socket]) -> None:
    channel, controller = Channel(ends[0]), ends[1]
    assert {type(command) for command in COMMANDS} == set(get_args(Command))
    for command in COMMANDS:
        controller.sendall(frame(command))
    assert [channel.receive() for _ in COMMANDS] == COMMANDS
    controller.sendall(frame("cut off")[:5])
    controller.close()
    assert channel.receive() is None


def test_frame_is_a_length_and_a_pickle() -> None:
    data = frame({"a": 1})

    assert struct.unpack(">Q", data[:8]) == (len(data) - 8,)
    assert pickle.loads(data[8:]) == {"a": 1}


def test_exit_of_a_worker_is_detected_at_once_although_its_connection_stays_open():
    ours, theirs = socket.socketpair()
    interrupts = Interrupts()
    group = ConnectedGroup(time.monotonic() + 60, interrupts)
    group.add_connection(0, ours)
    with theirs, contextlib.closing(interrupts):
        Channel(theirs).send_event(PhaseEntered(0, RankState.TRAINING, 1.0))
        started = time.monotonic()
        group.note_exit(0, 3)
        assert time.monotonic() - started < 10
        events = []

        def deliver(event: Event) -> bool:
            events.append(event)
            return False

        group.pump(deliver, 0)
    group.close_connections()
    assert events == [PhaseEntered(0, RankState.TRAINING, 1.0), Exited(0, 3, "")]
