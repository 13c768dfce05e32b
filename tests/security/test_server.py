"""Clients and runs that try to block the pages of `drivetrain runs serve` for other clients."""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from drivetrain_console._views.server import RunsServer
from tests import serving as serve
from tests.security.conftest import ALL_ATTACKS
from tests.security.test_hostile_runs import MAKERS, make_fifo, replace
from tests.serving import serving
from tests.support import DEADLINE_S

CLIENTS = 500 if ALL_ATTACKS else 30


@pytest.fixture
def server(place: Path) -> Iterator[RunsServer]:
    with serving(place) as server:
        yield server


def get(server: RunsServer, path: str) -> tuple[int, str]:
    status, _, text = serve.get(server, path, limit_s=10.0)
    return status, text


@contextlib.contextmanager
def connections(server: RunsServer, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            address = ("127.0.0.1", urlsplit(server.url).port)
            made.append(stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S)))
            made[-1].sendall(sent)
        yield made


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_hostile_run_does_not_affect_the_others(server: RunsServer, place: Path, make) -> None:
    for name in ("run.json", "manifest.json", "result.json"):
        shutil.copytree(place / "good", place / f"hostile-{name}", dirs_exist_ok=True)
        replace(place / f"hostile-{name}" / name, make)
    status, text = get(server, "/data")
    rows = {Path(row["location"]).name: row for row in json.loads(text)["runs"]}
    assert status == 200
    assert rows["good"]["status"] == "failed"
    assert rows.keys() == {"good", "hostile", "hostile-run.json", "hostile-manifest.json", "hostile-result.json"}
    for row in rows.values():
        assert get(server, row["link"])[0] in (200, 503)
    assert get(server, "/run/good")[0] == 200


def test_reason_is_in_the_row_and_on_the_page(server: RunsServer, place: Path) -> None:
    replace(place / "hostile" / "manifest.json", make_fifo)
    row = next(row for row in json.loads(get(server, "/data")[1])["runs"] if row["status"] == "unreadable")
    assert "manifest.json: expected a regular file, got a named pipe" in row["error"]
    status, text = get(server, "/run/hostile")
    assert status == 503
    assert "got a named pipe" in text


def test_names_in_any_encoding_are_listed(server: RunsServer, place: Path) -> None:
    (place / "hostile").rename(os.path.join(place, os.fsdecode(b"hostile\xff\x1b[2J")))
    status, text = get(server, "/data")
    assert status == 200
    links = [row["link"] for row in json.loads(text)["runs"]]
    assert "/run/hostile%FF%1B%5B2J" in links
    assert [get(server, link)[0] for link in links] == [200, 200]


def test_silent_and_slow_clients_do_not_block_others(server: RunsServer) -> None:
    server._server.max_clients = 8
    for sent in (b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX"):
        with connections(server, CLIENTS, sent):
            for _ in range(3):
                assert get(server, "/")[0] == 200


def test_request_that_arrives_byte_by_byte_has_a_deadline(server: RunsServer) -> None:
    server.request_limit_s = 0.5
    with connections(server, 1, b"GET / HTTP/1.1\r\n") as (client,):
        client.settimeout(0.05)
        sent_bytes = 0
        while sent_bytes < 600:  # far more than there is time for
            with contextlib.suppress(TimeoutError):
                assert client.recv(1000) == b""
                break
            try:
                client.sendall(b"X")
            except OSError:
                break
            sent_bytes += 1
        assert sent_bytes < 600


def test_client_that_does_not_read_has_a_deadline(server: RunsServer, place: Path) -> None:
    server.response_limit_s = 0.5
    text = json.dumps({"note": "x" * 15_000_000})  # more than fits into the buffers of a connection
    (place / "hostile" / "result.json").write_text(f"{text}\n")
    server._server.max_clients = 1
    request = b"GET /run/hostile/data HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connections(server, 1, request) as (client,):
        assert client.recv(8) == b"HTTP/1.1"
        wait_until_accepted(server)


def wait_until_accepted(server: RunsServer, change: Callable[[], None] = lambda: None) -> None:
    """Sends requests until the server accepts one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        change()
        with contextlib.suppress(ConnectionError):  # the refusal may be lost with the connection
            if get(server, "/")[0] == 200:
                return
    raise AssertionError(f"no place for a client after {DEADLINE_S} s")


def test_streams_are_limited_and_a_closed_one_makes_room_for_another(server: RunsServer, place: Path) -> None:
    server._server.max_clients = 4
    server.pages.poll_s = 0.05
    request = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connections(server, 4, request) as clients:
        for client in clients:
            assert client.recv(20).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):  # the refusal may be lost with the connection
            assert get(server, "/")[0] == 503
        clients[0].close()
        wait_until_accepted(
            server, (place / "hostile" / "error.json").touch
        )  # events, which the closed connection refuses
