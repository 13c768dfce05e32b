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
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from drivetrain import ConfigurationError, ResourceError
from drivetrain._wire import handshake
from drivetrain._wire.frames import AuthenticatedSocket, Channel, Inbox, frame, receive, receive_bytes
from drivetrain._wire.handshake import connect_to_driver
from drivetrain.plugin.runtimes import DriverAddress, Introduction, WorkerListener
from tests.support import free_port

LENGTHS = struct.Struct(">HI")
GREETING_OF_7 = handshake._GREETING.pack(b"drivetrain", 7, b"n" * 16)
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


def read_greeting(connection: socket.socket) -> bytes:
    """Return the driver's nonce. The listener must have accepted the connection, or be accepting it."""
    greeting = receive_bytes(connection, handshake._GREETING.size)
    assert greeting is not None
    return bytes(handshake._GREETING.unpack(greeting)[2])


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


@contextlib.contextmanager
def connect(listener: WorkerListener, index: int = 0) -> Iterator[Future[AuthenticatedSocket]]:
    """Connect as a worker does, in another thread, because the worker waits for the driver's greeting."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            connect_to_driver, listener.address, index, node_id=None, ip=None, details="details", stacks=7
        )
        yield future
        future.result().close()


def keys_of(listener: WorkerListener, connection: socket.socket) -> tuple[bytes, handshake._Keys]:
    """Return what a worker sends to prove that it knows the token, and its keys. The driver has sent the greeting."""
    nonce = b"n" * 16
    keys = handshake._Keys(listener.address.token, read_greeting(connection) + nonce)
    return nonce + keys.proof, keys


def prove(listener: WorkerListener, connection: socket.socket) -> AuthenticatedSocket:
    """Let the driver accept a connection, and prove that this end knows the token."""
    handle(listener)
    proof, keys = keys_of(listener, connection)
    connection.sendall(proof)
    return AuthenticatedSocket(connection, outgoing=keys.to_driver, incoming=keys.to_worker)


def introduce(connection: AuthenticatedSocket, versions: bytes, body: bytes) -> None:
    introduction = LENGTHS.pack(len(versions), len(body)) + versions + body
    connection.sendall(introduction + connection.outgoing.next(introduction))


def message(listener: WorkerListener, connection: socket.socket, index: int) -> bytes:
    """Return what a worker sends after the greeting."""
    proof, keys = keys_of(listener, connection)
    versions = json.dumps({**handshake._own_versions(), "host": "host-b", "number": index}).encode()
    body = pickle.dumps((index, {}, None, 7, ()))
    introduction = LENGTHS.pack(len(versions), len(body)) + versions + body
    return proof + introduction + keys.to_driver.next(introduction)


def is_closed(connection: socket.socket) -> bool:
    """Return True if the driver has closed the connection, whatever it has sent before."""
    try:
        while connection.recv(1 << 10):
            pass
        return True
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
                slow.sendall(b"n")
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
        listener.accept()
        late.sendall(message(listener, late, 4))
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
            worker.sendall(message(listener, worker, index))
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
            select.select([patient], [], [], 10)
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
                is_closed(connection)
        with connect(patient):
            accept_one(patient).connection.close()


class Poison:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("prefix", [b"", b"\0" * 48, b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n"])
def test_nothing_is_unpickled_without_the_token(patient: WorkerListener, prefix: bytes, tmp_path: Path) -> None:
    body = pickle.dumps(Poison(tmp_path / "unpickled"))
    with peer(patient) as connection:
        connection.sendall(prefix + LENGTHS.pack(2, len(body)) + b"{}" + body + bytes(48))
        handle(patient)
        connection.settimeout(10)
        assert is_closed(connection)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((2, 1 << 31), "at most 1,048,576 bytes, got 2,147,483,648 bytes"),
        ((1 << 15, 2), "expected the versions of drivetrain and Python, got an introduction without them"),
    ],
)
def test_introduction_that_is_too_large_is_refused_before_it_is_read(
    patient: WorkerListener, lengths: tuple[int, int], expected: str
) -> None:
    with peer(patient) as raw, prove(patient, raw) as connection:
        connection.sendall(LENGTHS.pack(*lengths))
        with pytest.raises(ConfigurationError, match=rf"a worker on 127\.0\.0\.1: .*{expected}"):
            accept_one(patient)
        assert expected in receive(connection).reason
        assert is_closed(connection)


@pytest.mark.parametrize("versions", [b"[1]", b"null", b"\xff\xff", b"[" * 4000])
def test_worker_without_versions_is_named(patient: WorkerListener, versions: bytes) -> None:
    with peer(patient) as raw, prove(patient, raw) as connection:
        introduce(connection, versions, b"")
        with pytest.raises(ConfigurationError, match="expected the versions of drivetrain and Python"):
            accept_one(patient)


def test_worker_with_another_protocol_than_the_driver_says_so(
    listener: WorkerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake._Peer, "greet", lambda peer: peer.connection.send(GREETING_OF_7))
    expected = r"\[DT-306\] expected protocol 7, as in the driver at 127\.0\.0\.1:\d+, got 2 on"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(connect_to_driver, listener.address, 0, node_id=None, ip=None, details=None, stacks=7)
        handle(listener)
        with pytest.raises(ConfigurationError, match=expected):
            future.result(timeout=10)


def test_worker_does_not_answer_another_program_at_the_address_of_the_driver() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = DriverAddress("127.0.0.1", server.getsockname()[1], b"t" * 32)
        future = pool.submit(connect_to_driver, address, 0, node_id=None, ip=None, details=None, stacks=7)
        other, _ = server.accept()
        with other:
            other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ConnectionError, match="got another program that listens there"):
                future.result(timeout=10)
            assert other.recv(100) == b""


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
    with peer(patient) as connection:
        handle(patient)
        whole = message(patient, connection, 5)
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


@pytest.mark.parametrize(("name", "got"), [("drivetrain", "0.0.1"), ("Python", "2.7")])
def test_worker_with_another_version_is_named_and_nothing_of_it_is_unpickled(
    patient: WorkerListener, name: str, got: str, tmp_path: Path
) -> None:
    own = handshake._own_versions()
    versions = json.dumps({**own, name: got, "host": "host-b", "number": 3}).encode()
    body = pickle.dumps(Poison(tmp_path / "unpickled"))
    with peer(patient) as raw, prove(patient, raw) as connection:
        introduce(connection, versions, body)
        expected = rf"\[DT-306\] worker 3 on host 'host-b': expected {name} {own[name]}, as in the driver, got '{got}'"
        with pytest.raises(ConfigurationError, match=expected):
            accept_one(patient)
        assert re.match(expected, receive(connection).reason)
        assert is_closed(connection)
    assert not (tmp_path / "unpickled").exists()


def test_first_of_several_differences_is_named(patient: WorkerListener) -> None:
    versions = json.dumps({"drivetrain": "0.0.1", "Python": "2.7"}).encode()
    with peer(patient) as raw, prove(patient, raw) as connection:
        introduce(connection, versions, b"")
        with pytest.raises(ConfigurationError, match="expected drivetrain"):
            accept_one(patient)


class Wire:
    """A proxy between workers and the driver that records, and may change, all traffic."""

    def __init__(self, listener: WorkerListener) -> None:
        self._target = listener.address
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = DriverAddress("127.0.0.1", self._server.getsockname()[1], listener.address.token)
        self.to_driver, self.to_worker = bytearray(), bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        worker, _ = self._server.accept()
        with socket.create_connection((self._target.host, self._target.port)) as driver, worker:
            while True:
                ready, _, _ = select.select([worker, driver], [], [])
                for source in ready:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is worker:
                        self.to_driver += data
                        driver.sendall(self.change(data))
                    else:
                        self.to_worker += data
                        worker.sendall(data)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def tapped(patient: WorkerListener) -> Iterator[tuple[Wire, AuthenticatedSocket, Inbox]]:
    """A worker and a driver that have completed the handshake over a wire that someone taps."""
    with contextlib.closing(Wire(patient)) as wire, ThreadPoolExecutor(1) as pool:
        future = pool.submit(connect_to_driver, wire.address, 3, node_id=None, ip=None, details=None, stacks=7)
        inbox = Inbox(accept_one(patient).connection)
        with future.result(timeout=10) as worker:
            yield wire, worker, inbox
        inbox.socket.close()


def read_one(inbox: Inbox) -> list[object]:
    messages: list[object] = []
    deadline = time.monotonic() + 10
    while not messages and not inbox.closed and time.monotonic() < deadline:
        select.select([inbox.socket], [], [], 1)
        messages += inbox.read()
    return messages


def test_traffic_does_not_contain_the_token_and_cannot_be_repeated(
    patient: WorkerListener, tapped: tuple[Wire, AuthenticatedSocket, Inbox]
) -> None:
    wire, worker, inbox = tapped
    Channel(worker).send({"loss": 0.5})
    assert read_one(inbox) == [{"loss": 0.5}]
    token = patient.address.token
    for traffic in (wire.to_driver, wire.to_worker):
        assert token not in traffic
        assert token.hex().encode() not in traffic

    with peer(patient) as repeated:
        handle(patient)
        read_greeting(repeated)
        repeated.sendall(wire.to_driver)
        handle(patient)
        repeated.settimeout(10)
        assert is_closed(repeated)


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [flip_last_bit, lambda data: data + data], ids=["changed", "repeated"])
def test_message_that_was_changed_or_repeated_on_the_wire_is_not_unpickled(
    tapped: tuple[Wire, AuthenticatedSocket, Inbox], tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    wire, worker, inbox = tapped
    wire.change = change
    Channel(worker).send(Poison(tmp_path / "unpickled"))
    read_one(inbox)
    is_repeated = (tmp_path / "unpickled").exists()
    (tmp_path / "unpickled").unlink(missing_ok=True)
    while not inbox.closed:
        read_one(inbox)

    assert is_repeated == (change is not flip_last_bit)
    assert not (tmp_path / "unpickled").exists()


def test_worker_unpickles_only_messages_of_the_driver(
    tapped: tuple[Wire, AuthenticatedSocket, Inbox], tmp_path: Path
) -> None:
    _, worker, inbox = tapped
    raw = socket.socket(fileno=inbox.socket.detach())  # as someone who has taken the connection over
    with raw:
        forged = frame(Poison(tmp_path / "unpickled"))
        raw.setblocking(True)
        raw.sendall(forged + b"m" * 16)
        with pytest.raises(ConnectionError, match="wrong authentication code"):
            receive(worker)
    assert not (tmp_path / "unpickled").exists()


def test_message_costs_at_most_some_bytes_more_than_on_one_machine(
    tapped: tuple[Wire, AuthenticatedSocket, Inbox],
) -> None:
    _, worker, inbox = tapped
    before = len(tapped[0].to_driver)
    Channel(worker).send("x" * 1000)
    read_one(inbox)
    assert len(tapped[0].to_driver) - before == len(frame("x" * 1000)) + 16


def test_listener_uses_the_selected_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setenv("DRIVETRAIN_PORTS", f"{first}-{first + 1}")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            listener = stack.enter_context(contextlib.closing(WorkerListener("127.0.0.1")))
            assert listener.address.port in (first, first + 1)
        with pytest.raises(
            ResourceError, match=r"\[DT-309\] DRIVETRAIN_PORTS or .*: expected a free port of 127\.0\.0\.1"
        ):
            WorkerListener("127.0.0.1")


@pytest.mark.parametrize("text", ["80", "9-8", "0-5", "1-70000", "a-b", "1-2-3"])
def test_ports_that_are_no_range_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DRIVETRAIN_PORTS", text)
    with pytest.raises(ConfigurationError, match=r"\[DT-116\] .* expected a range of ports, such as 29500-29599, got"):
        WorkerListener("127.0.0.1")


def test_worker_connects_over_ipv6() -> None:
    try:
        listener = WorkerListener("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with contextlib.closing(listener), connect(listener, 4):
        introduction = accept_one(listener)
        introduction.connection.close()
    assert (introduction.index, introduction.facts["ip"]) == (4, "::1")
