"""Serves live pages of the runs in a directory, with updates as server-sent events.

While a client watches the page of a run, the server polls the files of the run. When the files change, it sends the new
data of the page. The server never writes to the directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import http
import io
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, quote, unquote, unquote_to_bytes, urlsplit

from drivetrain import ConfigurationError, StorageError
from drivetrain.plugin.callbacks import printable_text, redact
from drivetrain.plugin.files import ERROR_FILE, LOCK_FILE, MANIFEST, RUN_FILE, TIMELINE_FILE, USAGE_FILE
from drivetrain.plugin.reading import rank_files
from drivetrain.plugin.storage import Storage
from drivetrain.runs import CurveReader, RunReader, readers_in
from drivetrain_console._views.clients import DeadlineReader, LimitedServer
from drivetrain_console._views.page import describe_run, describe_runs, encode, render

__all__ = ["RunsServer"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")
_COOKIE = "drivetrain_token"
_POLL_S = 1.0
_REMOTE_POLL_S = 20.0
_KEEP_ALIVE_S = 15.0
_READ_LIMIT_S = 0.5
"""The time limit for reading reports before a page is sent; the remaining reports follow in updates of the page."""
_SLOWDOWN = 20.0
"""The minimum interval between two reads of a run for the list, as a multiple of the duration of the last read."""
_ROW_WAIT_S = 2.0
_REQUEST_S = 10.0
_RESPONSE_S = 30.0
_LIVE = ("running", "locked")


class RunsServer:
    """Serves the pages of a directory of runs, or of a single run, on separate threads.

    On a loopback address, every user of this machine can view the pages, unless a token is given. On any other address,
    or if a token is given, requests must contain the token, as :attr:`url` does.

    Args:
        storage: the directory of runs, or a run directory.
        host: the address to listen on.
        port: the port; 0 for a free one.
        token: the token that requests must contain. None creates a random token, except on a loopback address.

    Attributes:
        url: the address to open in a browser.
        request_limit_s: the time limit in seconds for a client to send a whole request.
        response_limit_s: the time limit in seconds for a client to receive a response or an event.

    Raises:
        ConfigurationError: the server cannot listen on the address.
    """

    def __init__(self, storage: Storage, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        host = host.removeprefix("[").removesuffix("]")
        self.is_loopback = host in _LOOPBACK
        self.token = token if token or self.is_loopback else secrets.token_urlsafe(24)
        self.request_limit_s = _REQUEST_S
        self.response_limit_s = _RESPONSE_S
        self.pages = _Pages(storage)
        self.ended = threading.Event()
        server = self

        class Handler(_Handler):
            runs = server

        try:
            self._server = _server_class(_address_family(host))((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"runs serve: expected an unused address and port of this machine, got {_in_url(host)}:{port} "
                f"({error.strerror or error}). Choose others, or port 0 for any free port"
            ) from error
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else _in_url(host)
        self.url = f"http://{shown}:{self._server.server_address[1]}/"
        if self.token:
            self.url += f"?token={quote(self.token)}"

    def serve(self) -> None:
        """Serve requests until :meth:`close` is called from another thread."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop :meth:`serve` and all streams of events."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


def _server_class(family: socket.AddressFamily) -> type[LimitedServer]:
    class Server(LimitedServer):
        address_family = family

    return Server


def _address_family(host: str) -> socket.AddressFamily:
    """Return the family of an address or host name: IPv6 only if it has no IPv4 address.

    Raises:
        OSError: the address does not exist.
    """
    addresses = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family for family, *_ in addresses}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


def _in_url(host: str) -> str:
    return f"[{host.replace('%', '%25')}]" if ":" in host else host


def _host_of(header: str) -> str:
    """Return the host in a ``Host`` header, without the port and the brackets of an IPv6 address."""
    match = _HOST.fullmatch(header)
    return (match[1] or match[2]) if match else ""


class _Pages:
    """The documents of the list of runs and of each run's page. A document is created once for all clients."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.poll_s = _POLL_S if storage.is_local else _REMOTE_POLL_S
        self._lock = threading.Lock()
        self._views: dict[str, _RunView] = {}
        self._rows: dict[str, _Row] = {}

    def names(self) -> dict[str, Storage]:
        return {run.directory_name: run.storage for run in readers_in(self.storage)}

    def run(self, name: str) -> _RunView | None:
        if name not in self._views:
            storage = self.names().get(name)  # only names in the listing can be opened
            if storage is None:
                return None
            with self._lock:
                self._views.setdefault(name, _RunView(storage))
        return self._views[name]

    def index(self) -> tuple[str, str]:
        """Return a stamp and the document of the list of runs. The stamp changes whenever the list changes."""
        states, summaries = {}, []
        for name, storage in self.names().items():
            with self._lock:
                row = self._rows.setdefault(name, _Row(storage))
            summary = row.read()
            states[name] = (row.state, summary["status"])
            summaries.append({**summary, "link": _path_of(name)})
        summaries.sort(key=lambda summary: -summary["began"])
        document = describe_runs(self.storage.root, summaries)
        stamp = _stamp(states)
        return stamp, encode({**document, "events": f"/events?seen={stamp}"})


class _Row:
    """The row of a run in the list. A run that is slow to read is read less often, so that it cannot block others.

    Attributes:
        state: the state of the run's files when they were last read.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._summary: dict[str, Any] = {}
        self._next_read_at = 0.0
        self.state: Any = None

    def read(self) -> dict[str, Any]:
        """Return the summary of the run, or the previous summary while another thread reads the run."""
        if not self._lock.acquire(timeout=0 if self._summary else _ROW_WAIT_S):
            return self._summary or RunReader(self._storage).unreadable("reading it takes too long")
        try:
            started = time.monotonic()
            if self._summary and started < self._next_read_at:
                return self._summary
            state = _state(self._storage)
            # A live run may have been killed, which does not change any file.
            if not self._summary or self.state != state or self._summary["status"] in _LIVE:
                self._summary, self.state = RunReader(self._storage).summary(), state
                ended = time.monotonic()
                self._next_read_at = ended + _SLOWDOWN * (ended - started)
            return self._summary
        finally:
            self._lock.release()


def _path_of(name: str) -> str:
    """Return the URL path of a run's page. The name of the run may contain any bytes."""
    return f"/run/{quote(os.fsencode(name), safe='')}"


class _RunView:
    """The page of one run."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._lock = threading.Lock()
        self._reader = CurveReader(storage)
        self._sizes: dict[str, tuple[int, int] | None] = {}
        self._current: tuple[str, str] | None = None
        self._state: Any = None
        self._is_live = True
        self.is_behind = False
        self._checked = 0.0

    def document(self, name: str, poll_s: float) -> tuple[str, str]:
        """Return a stamp and the document of the run's page. The stamp changes whenever the run changes."""
        with self._lock:
            is_fresh = time.monotonic() - self._checked < poll_s / 2 and not self.is_behind
            if self._current is not None and is_fresh:
                return self._current
            self._checked = time.monotonic()
            state = _state(self.storage)
            if self._current is None or self._is_live or self.is_behind or state != self._state:
                record = describe_run(self.storage, self._reader, self._sizes, _READ_LIMIT_S)
                self._state, self._is_live = state, record["status"] in _LIVE
                self.is_behind = record["read"] < 1
                stamp = _stamp((state, record["status"], record["read"]))
                if self._current is None or self._current[0] != stamp:
                    path = _path_of(name)
                    self._current = stamp, encode({**record, "events": f"{path}/events?seen={stamp}", "home": "/"})
            return self._current


def _stamp(state: Any) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def _state(storage: Storage) -> Any:
    """Return a value that is different after the files of the run have changed."""
    names = [RUN_FILE, MANIFEST, TIMELINE_FILE, USAGE_FILE, ERROR_FILE, LOCK_FILE, "metrics"]
    if not storage.is_local:
        return time.time() // _REMOTE_POLL_S  # detecting a change costs as much as reading the run
    with contextlib.suppress(StorageError):  # the directory cannot be listed
        names += rank_files(storage).values()
    state = []
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(storage.path(name))
            state.append((name, status.st_size, status.st_mtime_ns))
    return tuple(state)


class _Handler(BaseHTTPRequestHandler):
    runs: RunsServer
    server: LimitedServer
    protocol_version = "HTTP/1.1"
    server_version = "drivetrain"
    sys_version = ""

    def setup(self) -> None:
        """Prepare a connection with a time limit for its requests."""
        super().setup()
        self.rfile.close()
        self._reader = DeadlineReader(self.connection, self.runs.request_limit_s)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Handle one request."""
        self._reader.start()
        self.server.set_sending(self.connection, sending=True)
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: requests do not concern the user of the terminal."""

    def do_GET(self) -> None:
        """Handle a GET request."""
        self.server.set_sending(self.connection, sending=False)
        self.connection.settimeout(self.runs.response_limit_s)
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._respond()

    def _respond(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._is_allowed(query):
            return
        make: Callable[[], tuple[str, str]]
        is_behind: Callable[[], bool]
        parts = [os.fsdecode(unquote_to_bytes(part)) for part in url.path.split("/") if part]
        try:
            if parts[:1] == ["run"] and len(parts) > 1:
                title, form = parts[1], parts[2:]
                view = self.runs.pages.run(title)
                if view is None:
                    self._reject(http.HTTPStatus.NOT_FOUND, f"run not found: {title!r}")
                    return
                make = functools.partial(view.document, title, self.runs.pages.poll_s)
                is_behind = functools.partial(getattr, view, "is_behind")
            else:
                title, form, make = "runs", parts, functools.partial(self.runs.pages.index)
                is_behind = bool
            if form == ["events"]:
                self._stream(make, is_behind, self.headers.get("Last-Event-ID") or query.get("seen", [""])[0])
            elif form == ["data"]:
                self._send(make()[1], "application/json")
            elif not form:
                self._send(render(make()[1], title), "text/html; charset=utf-8")
            else:
                self._reject(http.HTTPStatus.NOT_FOUND, "page not found")
        except StorageError as error:
            self._reject(http.HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _is_allowed(self, query: Mapping[str, list[str]]) -> bool:
        """Return True if the request is allowed; otherwise, send an error response and return False.

        If the server has a token, the request must contain it. Without a token, a server on a loopback address rejects
        requests whose ``Host`` header names another host. A page of another website can send such requests, if a host
        name of that website resolves to this machine.
        """
        runs = self.runs
        if runs.token:
            given = query.get("token", [""])[0]
            if given and hmac.compare_digest(given.encode(), runs.token.encode()):
                self._cookie = f"{self._cookie_name}={quote(runs.token)}; HttpOnly; SameSite=Strict; Path=/"
                return True
            if hmac.compare_digest(self._token_in_cookie().encode(), runs.token.encode()):
                return True
            self._reject(
                http.HTTPStatus.FORBIDDEN,
                "token: missing or wrong. Open the whole address that drivetrain runs serve printed",
            )
            return False
        if runs.is_loopback and _host_of(self.headers.get("Host", "")) not in _LOOPBACK:
            self._reject(
                http.HTTPStatus.FORBIDDEN,
                "Host header: expected localhost, 127.0.0.1 or ::1, got another host. Open the address that drivetrain "
                "runs serve printed",
            )
            return False
        return True

    _cookie = ""

    def _token_in_cookie(self) -> str:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        return unquote(cookies[self._cookie_name].value) if self._cookie_name in cookies else ""

    @property
    def _cookie_name(self) -> str:
        """The name of the cookie. It contains the port, because browsers send cookies to all ports of a host."""
        return f"{_COOKIE}_{self.connection.getsockname()[1]}"

    def _stream(self, make: Callable[[], tuple[str, str]], is_behind: Callable[[], bool], seen: str) -> None:
        """Send each new state of a page as an event, until the client disconnects.

        Args:
            make: returns the current state of the page: a stamp, which changes with every change, and the document.
            is_behind: returns True if reports are left to read. They are read without waiting for the next poll.
            seen: the stamp of the state that the browser shows.
        """
        self.send_response(http.HTTPStatus.OK)
        self._send_headers("text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = float("-inf")
        while not self.runs.ended.is_set() and not self._has_client_left():
            chunk, readable = b"", False
            with contextlib.suppress(StorageError):  # the error may be temporary
                stamp, document = make()
                readable = True
                if stamp != seen:
                    seen, chunk = stamp, f"id: {stamp}\ndata: {document}\n\n".encode()
            if not chunk and time.monotonic() - sent > _KEEP_ALIVE_S:
                chunk = b": nothing new\n\n"  # detects a client whose machine is unreachable
            if chunk:
                self.wfile.write(chunk)
                self.wfile.flush()
                sent = time.monotonic()
            if not readable or not is_behind():
                self.runs.ended.wait(self.runs.pages.poll_s)

    def _has_client_left(self) -> bool:
        """Return True if the client has closed the connection. A write would notice it only the second time."""
        poller = select.poll()  # select() does not accept descriptors from 1024 on
        poller.register(self.connection, select.POLLIN)
        try:
            return bool(poller.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _send(self, text: str, kind: str) -> None:
        data = text.encode(errors="replace")  # the name of a run may not be valid text
        self.send_response(http.HTTPStatus.OK)
        self._send_headers(kind)
        if self._cookie:
            self.send_header("Set-Cookie", self._cookie)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _reject(self, status: http.HTTPStatus, message: str) -> None:
        data = f"{printable_text(redact(message))}\n".encode()
        self.send_response(status)
        self._send_headers("text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
