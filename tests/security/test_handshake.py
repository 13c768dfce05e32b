"""Peers that connect to the driver's port: a hostile one neither blocks the driver nor makes it unpickle anything."""

import contextlib
import json
import pickle
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain._wire import handshake
from drivetrain._wire.frames import frame, receive
from drivetrain._wire.handshake import connect_to_driver
from drivetrain.plugin.runtimes import Introduction, WorkerListener

LENGTHS = struct.Struct(">HI")
TIMEOUT_S = 1.0
AT_ONCE_S = 0.8
"""A call that waits for a peer takes at least TIMEOUT_S; this leaves room for a busy machine."""


@pytest.fixture
def listener() -> Iterator[WorkerListener]:
    with contextlib.closing(WorkerListener("127.0.0.1", handshake_timeout_s=TIMEOUT_S)) as listener:
        yield listener


@pytest.fixture
def patient() -> Iterator[WorkerListener]:
    """A listener whose deadline is never reached."""
    with contextlib.closing(WorkerListener("127.0.0.1", handshake_timeout_s=60)) as listener:
        yield listener


@contextlib.contextmanager
def peer(listener: WorkerListener) -> Iterator[socket.socket]:
    address = listener.address
    with socket.create_connection((address.host, address.port), timeout=10) as connection:
        yield connection


def accept_one(listener: WorkerListener, deadline_s: float = 10) -> Introduction:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        select.select([listener], [], [], max(0.0, deadline - time.monotonic()))
        if (introduction := listener.accept()) is not None:
            return introduction
    raise AssertionError("no worker was introduced")


def handle(listener: WorkerListener) -> None:
    """Handles the events that are ready, and fails if that blocks."""
    select.select([listener], [], [], 10)
    began = time.process_time(), time.monotonic()
    assert listener.accept() is None
    assert time.monotonic() - began[1] < AT_ONCE_S + time.process_time() - began[0]


def connect(listener: WorkerListener, index: int = 0) -> socket.socket:
    return connect_to_driver(listener.address, index, node_id=None, ip=None, details="details", stacks=7)


def message(listener: WorkerListener, index: int) -> bytes:
    """Return the message that a worker sends."""
    versions = json.dumps({**handshake._own_versions(), "host": "host-b", "number": index}).encode()
    body = pickle.dumps((index, {}, None, 7))
    return listener.address.token + LENGTHS.pack(len(versions), len(body)) + versions + body


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # bytes that were never read reset the connection
        return True


def assert_closed_by_deadline(listener: WorkerListener, connection: socket.socket) -> None:
    """Handles events, as a controller does, until the connection is closed."""
    connection.setblocking(False)
    for _ in range(100):
        try:
            if is_closed(connection):
                return
        except BlockingIOError:
            assert select.select([listener], [], [], 10)[0], "the deadline wakes the controller"
            listener.accept()
    raise AssertionError("the connection is still open")


def test_silent_peer_blocks_no_other_peer_and_is_closed_at_the_deadline(listener: WorkerListener) -> None:
    with peer(listener) as silent:
        handle(listener)
        with connect(listener, 3):
            introduction = accept_one(listener)
            introduction.connection.close()
        assert (introduction.index, introduction.details, introduction.stacks) == (3, "details", 7)
        assert_closed_by_deadline(listener, silent)


def test_deadline_is_for_the_whole_handshake_of_a_peer_that_sends_single_bytes(listener: WorkerListener) -> None:
    with peer(listener) as slow:
        began = time.monotonic()
        while time.monotonic() - began < 10:
            try:
                slow.sendall(listener.address.token[:1])
            except ConnectionError:
                break
            if select.select([listener], [], [], TIMEOUT_S / 10)[0]:
                listener.accept()
                slow.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if is_closed(slow):
                        break
                slow.setblocking(True)
        assert time.monotonic() - began < 5


def test_introduction_that_has_arrived_is_read_although_the_deadline_is_over() -> None:
    with (
        contextlib.closing(WorkerListener("127.0.0.1", handshake_timeout_s=0)) as listener,
        peer(listener) as late,
        peer(listener) as silent,
    ):
        late_message = message(listener, 4)
        listener.accept()
        late.sendall(late_message)
        introduction = accept_one(listener)
        introduction.connection.close()
        assert introduction.index == 4
        assert_closed_by_deadline(listener, silent)


def test_workers_that_connect_at_once_replace_none_of_each_other() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(WorkerListener("127.0.0.1", expected=150)))
        workers = []
        for _ in range(300):
            workers.append(stack.enter_context(peer(listener)))
            select.select([listener], [], [], 10)
            assert listener.accept() is None
        for index, worker in enumerate(workers):
            worker.sendall(message(listener, index))
        introductions = [accept_one(listener) for _ in workers]
        for introduction in introductions:
            introduction.connection.close()
        assert {introduction.index for introduction in introductions} == set(range(300))


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_worker_is_accepted_once_there_is_a_free_descriptor(patient: WorkerListener) -> None:
    with peer(patient) as silent:
        handle(patient)
        with connect(patient, 6):
            with no_free_descriptor():
                handle(patient)
                assert is_closed(silent), "the oldest connection is closed"
                handle(patient)
                assert not select.select([patient], [], [], 0)[0], "the caller is not called again at once"
            introduction = accept_one(patient)
            introduction.connection.close()
            assert introduction.index == 6


def test_number_of_peers_that_have_not_completed_the_handshake_is_bounded() -> None:
    with contextlib.ExitStack() as stack:
        patient = WorkerListener("127.0.0.1", expected=1, handshake_timeout_s=60)
        stack.callback(patient.close)
        silent = []
        for _ in range(130):
            silent.append(stack.enter_context(peer(patient)))
            select.select([patient], [], [], 10)
            assert patient.accept() is None
        assert [is_closed(connection) for connection in silent[:2]] == [True, True]
        for connection in silent[2:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
        with connect(patient):
            accept_one(patient).connection.close()


class Poison:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("prefix", [b"", b"\0" * 32, b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n"])
def test_nothing_is_unpickled_without_the_token(patient: WorkerListener, prefix: bytes, tmp_path: Path) -> None:
    body = pickle.dumps(Poison(tmp_path / "unpickled"))
    with peer(patient) as connection:
        connection.sendall(prefix + LENGTHS.pack(2, len(body)) + b"{}" + body)
        handle(patient)
        connection.settimeout(10)
        assert is_closed(connection)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((2, 1 << 31), "at most 1,048,576 bytes, got 2,147,483,648 bytes"),
        ((1 << 15, 2), "expected protocol 1, as in the driver, got an introduction without versions"),
    ],
)
def test_introduction_that_is_too_large_is_refused_before_it_is_read(
    patient: WorkerListener, lengths: tuple[int, int], expected: str
) -> None:
    with peer(patient) as connection:
        connection.sendall(patient.address.token + LENGTHS.pack(*lengths))
        with pytest.raises(ConfigurationError, match=rf"a worker on 127\.0\.0\.1: .*{expected}"):
            accept_one(patient)
        assert expected in receive(connection).reason
        assert is_closed(connection)


@pytest.mark.parametrize(
    "introduction",
    [
        frame((3, {"hostname": "host-b"}, None, 7)),  # before there was a protocol version
        LENGTHS.pack(2, 0) + b"[]",
        LENGTHS.pack(3, 0) + b"[1]",
        LENGTHS.pack(4, 0) + b"null",
        LENGTHS.pack(2, 0) + b"\xff\xff",
        LENGTHS.pack(4000, 0) + b"[" * 4000,
    ],
)
def test_worker_of_a_protocol_without_versions_is_named(patient: WorkerListener, introduction: bytes) -> None:
    with peer(patient) as connection:
        connection.sendall(patient.address.token + introduction)
        with pytest.raises(ConfigurationError, match=r"expected (protocol 1|protocol 1, as in the driver)"):
            accept_one(patient)


def test_worker_process_learns_why_it_is_refused(patient: WorkerListener) -> None:
    address = patient.address
    program = (
        "import sys; from drivetrain._wire import handshake; from drivetrain.plugin.runtimes import DriverAddress; "
        "from drivetrain.plugin.runtimes import worker_main; "
        "handshake.__version__ = '0.0.1'; "
        "worker_main(DriverAddress(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.stdin.readline())), 3)"
    )
    command = [sys.executable, "-c", program, address.host, str(address.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        worker.stdin.write(f"{address.token.hex()}\n")
        worker.stdin.close()
        with pytest.raises(ConfigurationError, match=r"worker 3 on host .*: expected drivetrain .*, got '0\.0\.1'"):
            accept_one(patient, deadline_s=60)
        assert worker.stderr is not None
        last = worker.stderr.read().strip().splitlines()[-1]
    assert worker.returncode == 1
    assert "ConfigurationError: [DT-306] worker 3 on host" in last
    assert "got '0.0.1'. Install the same version on all nodes" in last


def test_introduction_that_arrives_in_pieces_is_put_together(patient: WorkerListener) -> None:
    sent: list[bytes] = []
    with connect(patient, 5) as worker:
        first = accept_one(patient).connection
        first.close()
        worker.close()
    whole = message(patient, 5)
    with peer(patient) as connection:
        for start in range(0, len(whole) - 10, 10):
            connection.sendall(whole[start : start + 10])
            sent.append(whole[start : start + 10])
            handle(patient)
        connection.sendall(whole[sum(map(len, sent)) :])
        introduction = accept_one(patient)
        introduction.connection.close()
    assert introduction.index == 5


def test_peer_that_closes_its_connection_is_forgotten(patient: WorkerListener) -> None:
    with peer(patient):
        handle(patient)
    handle(patient)
    assert not select.select([patient], [], [], 0)[0], "there is nothing left to handle"


@pytest.mark.parametrize(("name", "got"), [("protocol", "0"), ("drivetrain", "0.0.1"), ("Python", "2.7")])
def test_worker_with_another_version_is_named_and_nothing_of_it_is_unpickled(
    patient: WorkerListener, name: str, got: str, tmp_path: Path
) -> None:
    own = handshake._own_versions()
    versions = json.dumps({**own, name: got, "host": "host-b", "number": 3}).encode()
    body = pickle.dumps(Poison(tmp_path / "unpickled"))
    with peer(patient) as connection:
        connection.sendall(patient.address.token + LENGTHS.pack(len(versions), len(body)) + versions + body)
        expected = rf"\[DT-306\] worker 3 on host 'host-b': expected {name} {own[name]}, as in the driver, got '{got}'"
        with pytest.raises(ConfigurationError, match=expected):
            accept_one(patient)
        assert re.match(expected, receive(connection).reason)
        assert is_closed(connection)
    assert not (tmp_path / "unpickled").exists()


def test_first_of_several_differences_is_named(patient: WorkerListener) -> None:
    versions = json.dumps({"protocol": "1", "drivetrain": "0.0.1", "Python": "2.7"}).encode()
    with peer(patient) as connection:
        connection.sendall(patient.address.token + LENGTHS.pack(len(versions), 0) + versions)
        with pytest.raises(ConfigurationError, match="expected drivetrain"):
            accept_one(patient)
