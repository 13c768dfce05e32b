"""How a worker process connects to the driver and proves that it belongs to the driver's run.

The driver listens on a TCP port. Both sides know a secret token, which is never sent:

1. The driver sends a greeting: the version of the protocol, and a random number (its nonce).
2. The worker sends a nonce of its own, and a code that can be computed from both nonces only with the token. The driver
   compares it, in constant time, before it looks at anything else.
3. The worker sends the versions of drivetrain and of Python as JSON, and the pickled facts about the process, followed
   by an authentication code. The driver checks the code, then the versions, and unpickles the facts last.

From then on, each message in either direction has an authentication code, see :mod:`drivetrain._wire.frames`. The keys
of both directions depend on the token and on both nonces. So someone who reads all the traffic, or records and repeats
it, cannot send a message to either side.

If the token is valid, but the versions differ or the facts are too large, the peer is a worker that cannot be used. The
driver then sends it the command :class:`~drivetrain._wire.commands.Refuse`, and raises the same error itself.

Anyone who can reach the port can connect, so the driver never waits for a peer. It reads what has arrived, closes
connections that did not complete the handshake within a deadline, and limits the number of such connections and the
size of the data that they send. The connection is authenticated, but not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import platform
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from drivetrain._base.ports import listen
from drivetrain._plugins.node import gpu_models, own_versions
from drivetrain._version import __version__
from drivetrain._wire.commands import Refuse
from drivetrain._wire.frames import MAC_BYTES, AuthenticatedSocket, Seal, frame, receive_bytes
from drivetrain.errors import ConfigurationError

__all__ = ["CONNECT_WAIT_S", "PROTOCOL_VERSION", "DriverAddress", "Introduction", "WorkerListener", "connect_to_driver"]

CONNECT_WAIT_S = 10.0
"""Seconds that a worker waits for the connection, and that the driver waits for the end of the handshake."""

GREETING_WAIT_S = 300.0
"""Seconds that a worker waits for the greeting, because the driver may be busy starting thousands of workers."""

PROTOCOL_VERSION = 2
"""The version of the handshake, the commands and the events. Increment it with every incompatible change."""

_TOKEN_BYTES = 32
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_GREETING = struct.Struct(f">10sH{_NONCE_BYTES}s")
_MAGIC = b"drivetrain"
_LENGTHS = struct.Struct(">HI")
"""The sizes in bytes of the versions and of the pickled facts."""

_MAX_VERSIONS_BYTES = 4096
_MAX_FACTS_BYTES = 1 << 20
_MIN_PENDING_LIMIT = 128
_NO_DESCRIPTOR_PAUSE_S = 0.1
"""Seconds for which no connections are accepted after this process or the machine ran out of file descriptors."""

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """The address to which worker processes connect.

    Attributes:
        host: the IP address of the driver, as the workers reach it.
        port: the TCP port.
        token: the secret of the driver and its workers, which is never sent over the connection. Never pass it on a
            command line, which other users of the machine can read. Use an environment variable, a file that only its
            owner can read, or a channel of the cluster.
    """

    host: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first message of a worker process.

    Attributes:
        index: the number that the runtime gave the process.
        facts: the fields of :class:`drivetrain.plugin.WorkerInfo` except for the ranks and the accelerators.
        details: an object that the runtime passed to :func:`~drivetrain.plugin.runtimes.worker_main`.
        stacks: a descriptor in the worker process. After a request for the process's stacks, they can be read from it.
        connection: the driver's end of the connection.
        gpu_models: the models of the GPUs on the process's machine.
    """

    index: int
    facts: Mapping[str, Any]
    details: Any
    stacks: int
    connection: socket.socket
    gpu_models: Sequence[str] = ()


class _Keys:
    """The secrets of one connection.

    Args:
        token: the driver's token.
        nonces: the nonce of the driver and that of the worker.

    Attributes:
        proof: shows that the worker knows the token.
    """

    def __init__(self, token: bytes, nonces: bytes) -> None:
        def derive(purpose: bytes) -> bytes:
            return blake2b(nonces, digest_size=_PROOF_BYTES, key=token, person=purpose).digest()

        self.proof = derive(b"proof")
        self.to_driver = Seal(derive(b"to driver"))
        self.to_worker = Seal(derive(b"to worker"))


class _Refused(Exception):
    """A peer is not a worker of this driver, or closed the connection."""


class _Peer:
    """A connection whose handshake is not complete.

    Args:
        connection: the driver's end, non-blocking.
        deadline: the time on the monotonic clock by which the handshake must be complete.
        token: the driver's token.
    """

    def __init__(self, connection: socket.socket, deadline: float, token: bytes) -> None:
        self.connection = connection
        self.deadline = deadline
        self._token = token
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._data = bytearray()
        self._keys: _Keys | None = None

    def greet(self) -> None:
        """Send the greeting, which always fits into the buffer of a new connection.

        Raises:
            OSError: the peer has closed the connection.
        """
        self.connection.send(_GREETING.pack(_MAGIC, PROTOCOL_VERSION, self._nonce))

    def refuse(self, error: ConfigurationError) -> None:
        """Tell a worker why it cannot be used."""
        if self._keys is not None:
            message = frame(Refuse(str(error)))
            with contextlib.suppress(OSError):
                self.connection.send(message + self._keys.to_worker.next(message))

    def authenticated(self) -> AuthenticatedSocket:
        """Return the connection of a worker whose introduction is complete."""
        assert self._keys is not None
        return AuthenticatedSocket(self.connection, outgoing=self._keys.to_worker, incoming=self._keys.to_driver)

    def read(self) -> Introduction | None:
        """Read the available data without waiting, and return the introduction if it is complete.

        Raises:
            _Refused: the peer closed the connection, or is not a worker of this driver.
            ConfigurationError: the worker's versions differ from those of the driver, or its facts are too large.
        """
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while (missing := self._missing()) > 0:
                part = self.connection.recv(min(missing, _READ_BYTES))
                if not part:
                    raise _Refused("closed the connection")
                self._data += part
        return self._introduction() if self._missing() == 0 else None

    def _missing(self) -> int:
        """Return the number of bytes to read before the next check; 0 if the introduction is complete."""
        proven = _NONCE_BYTES + _PROOF_BYTES
        if self._keys is None:
            if len(self._data) < proven:
                return proven - len(self._data)
            keys = _Keys(self._token, self._nonce + self._data[:_NONCE_BYTES])
            if not compare_digest(keys.proof, self._data[_NONCE_BYTES:]):
                raise _Refused("does not know the token")
            self._keys = keys
            self._data.clear()
        if len(self._data) < _LENGTHS.size:
            return _LENGTHS.size - len(self._data)
        versions, facts = _LENGTHS.unpack_from(self._data)
        if not 0 < versions <= _MAX_VERSIONS_BYTES:
            raise self._without_versions()
        if facts > _MAX_FACTS_BYTES:
            raise ConfigurationError(
                f"a worker on {self._host()}: expected an introduction of at most {_MAX_FACTS_BYTES:,} bytes, got "
                f"{facts:,} bytes. Pass smaller details to worker_main()"
            )
        return int(_LENGTHS.size + versions + facts + MAC_BYTES - len(self._data))

    def _introduction(self) -> Introduction:
        assert self._keys is not None
        sent, code = self._data[:-MAC_BYTES], self._data[-MAC_BYTES:]
        if not self._keys.to_driver.matches(sent, code):
            raise _Refused("sent an introduction with a wrong authentication code")
        start, (size, _) = _LENGTHS.size, _LENGTHS.unpack_from(sent)
        try:
            versions = dict(json.loads(sent[start : start + size]))
        except (ValueError, TypeError, RecursionError) as error:
            raise self._without_versions() from error
        _require_same_versions(versions)
        index, facts, details, stacks, models = pickle.loads(sent[start + size :])
        return Introduction(index, facts, details, stacks, self.connection, models)

    def _without_versions(self) -> ConfigurationError:
        """Return the error for a worker whose release of drivetrain has a different handshake."""
        return ConfigurationError(
            f"[DT-306] a worker on {self._host()}: expected the versions of drivetrain and Python, got an introduction "
            "without them, from another release of drivetrain. Install the same version on all nodes"
        )

    def _host(self) -> str:
        try:
            return str(self.connection.getpeername()[0])
        except OSError:
            return "an unknown host"


class WorkerListener:
    """Accepts the connections of worker processes without blocking.

    Args:
        host: the IP address on this machine to listen on, of version 4 or 6.
        expected: number of worker processes that may connect at the same time. The number of connections with an
            incomplete handshake is limited to twice this value, or to 128 if that is more. A further connection
            replaces the oldest one.
        handshake_timeout_s: seconds after which a connection with an incomplete handshake is closed.
        token: the secret of 32 bytes; None for a new one.
        ports: the ports to choose from; None for those in ``DRIVETRAIN_PORTS``, or for any port if it is not set. A
            runtime passes ``GroupSpec.ports``.
    """

    def __init__(
        self,
        host: str,
        *,
        expected: int = 128,
        handshake_timeout_s: float = CONNECT_WAIT_S,
        token: bytes | None = None,
        ports: range | None = None,
    ) -> None:
        self._token = token or secrets.token_bytes(_TOKEN_BYTES)
        self._timeout_s = handshake_timeout_s
        self._pending_limit = max(_MIN_PENDING_LIMIT, 2 * expected)
        self._pending: dict[int, _Peer] = {}
        self._timer: threading.Timer | None = None
        self._listener = listen(host, backlog=self._pending_limit, ports=ports)
        self._listener.setblocking(False)
        self._expired = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        for source in (self._listener.fileno(), self._expired):
            self._poll.register(source, select.EPOLLIN)

    @property
    def address(self) -> DriverAddress:
        """The address for :func:`~drivetrain.plugin.runtimes.worker_main`."""
        host, port = self._listener.getsockname()[:2]
        return DriverAddress(host, port, self._token)

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`accept` has something to do."""
        return self._poll.fileno()

    def accept(self) -> Introduction | None:
        """Handle the available data without waiting, and return the introduction of the next worker process.

        Call this method whenever :meth:`fileno` is readable. The descriptor stays readable while there is more to
        handle. A connection with a wrong token is closed.

        Available data is read before late or excess connections are closed, so a worker that sent its introduction in
        time is accepted even if this method is called late.

        Returns:
            The introduction, or None if no worker process has completed the handshake.

        Raises:
            ConfigurationError: the Python or drivetrain version of a worker process differs from that of the driver, or
                its introduction is too large.
        """
        ready = {descriptor for descriptor, _ in self._poll.poll(0, len(self._pending) + 2)}
        for descriptor in ready & self._pending.keys():
            if (introduction := self._read(self._pending[descriptor])) is not None:
                return introduction
        if self._expired in ready:
            self._stop_timer()
            self._poll.modify(self._listener, select.EPOLLIN)  # ends the pause of _free_descriptor(), if any
        self._close_late_peers()
        if self._listener.fileno() in ready:
            return self._accept_peer()
        return None

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        self._stop_timer()
        for peer in list(self._pending.values()):
            self._close_peer(peer)
        self._listener.close()
        self._poll.close()
        os.close(self._expired)

    def _accept_peer(self) -> Introduction | None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # for example, the peer has already closed the connection; this must not fail the run
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._free_descriptor()
            return None
        connection.setblocking(False)
        peer = _Peer(connection, time.monotonic() + self._timeout_s, self._token)
        try:
            peer.greet()
        except OSError:
            connection.close()
            return None
        if len(self._pending) >= self._pending_limit:  # the oldest peer is probably no worker: those answer at once
            self._close_oldest_peer()
        self._pending[connection.fileno()] = peer
        self._poll.register(connection, select.EPOLLIN)
        introduction = self._read(peer)
        self._start_timer()
        return introduction

    def _read(self, peer: _Peer) -> Introduction | None:
        try:
            introduction = peer.read()
        except (_Refused, OSError):
            self._close_peer(peer)
            return None
        except ConfigurationError as error:
            peer.refuse(error)
            self._close_peer(peer)
            raise
        except BaseException:
            self._close_peer(peer)
            raise
        if introduction is not None:
            self._forget(peer)
            connection = peer.authenticated()
            _configure(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return replace(introduction, connection=connection)
        return None

    def _close_late_peers(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._pending.values() if peer.deadline <= now]:
            self._close_peer(peer)
        self._start_timer()

    def _start_timer(self) -> None:
        """Make :meth:`fileno` readable when the first deadline passes."""
        if self._timer is None and self._pending:
            first = next(iter(self._pending.values())).deadline
            self._set_timer(max(0.0, first - time.monotonic()))

    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = threading.Timer(seconds, os.eventfd_write, (self._expired, 1))
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._expired)

    def _free_descriptor(self) -> None:
        """Close the connection to the oldest peer to free its descriptor. Without a peer, pause accepting connections.

        Without the pause, :meth:`fileno` would stay readable, and the caller's retries would use a whole CPU.
        """
        if self._pending:
            self._close_oldest_peer()
        else:
            self._poll.modify(self._listener, 0)
            self._set_timer(_NO_DESCRIPTOR_PAUSE_S)

    def _close_oldest_peer(self) -> None:
        self._close_peer(next(iter(self._pending.values())))

    def _forget(self, peer: _Peer) -> None:
        del self._pending[peer.connection.fileno()]
        self._poll.unregister(peer.connection)

    def _close_peer(self, peer: _Peer) -> None:
        self._forget(peer)
        peer.connection.close()


def connect_to_driver(
    address: DriverAddress, index: int, *, node_id: str | None, ip: str | None, details: Any, stacks: int
) -> AuthenticatedSocket:
    """Connect to the driver, and send the introduction of this process.

    The arguments other than the address are for the fields of :class:`Introduction`.

    Raises:
        ConnectionError: the driver is unreachable, or something else listens at its address.
        ConfigurationError: the driver has another version of the protocol.
    """
    hostname = socket.gethostname()
    facts: dict[str, Any] = {"node_id": node_id or hostname, "hostname": hostname, "ip": ip, "pid": os.getpid()}
    facts["versions"] = own_versions()
    versions = json.dumps({**_own_versions(), "host": hostname, "number": index}).encode()
    try:
        connection = socket.create_connection((address.host, address.port), timeout=CONNECT_WAIT_S)
    except OSError as error:
        raise ConnectionError(
            f"[DT-305] a worker on {hostname} cannot reach the driver at {address.host}:{address.port} ({error}). "
            "Allow connections from the nodes of the cluster to the driver's node"
        ) from error
    try:
        own = secrets.token_bytes(_NONCE_BYTES)
        keys = _Keys(address.token, _await_greeting(connection, address) + own)
        _configure(connection)
        facts["ip"] = ip or connection.getsockname()[0]
        pickled = pickle.dumps((index, facts, details, stacks, gpu_models()), protocol=5)
        introduction = _LENGTHS.pack(len(versions), len(pickled)) + versions + pickled
        connection.sendall(own + keys.proof + introduction + keys.to_driver.next(introduction))
    except BaseException:
        connection.close()
        raise
    return AuthenticatedSocket(connection, outgoing=keys.to_driver, incoming=keys.to_worker)


def _await_greeting(connection: socket.socket, address: DriverAddress) -> bytes:
    """Return the nonce of the driver."""
    connection.settimeout(GREETING_WAIT_S)
    where = f"the driver at {address.host}:{address.port}"
    try:
        greeting = receive_bytes(connection, _GREETING.size)
    except TimeoutError as error:
        raise ConnectionError(f"[DT-305] {where} sent no greeting within {GREETING_WAIT_S:g} s") from error
    if greeting is None:
        raise ConnectionError(f"[DT-305] {where} closed the connection")
    magic, version, nonce = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise ConnectionError(f"[DT-305] expected {where}, got another program that listens there")
    if version != PROTOCOL_VERSION:
        raise ConfigurationError(
            f"[DT-306] expected protocol {version}, as in {where}, got {PROTOCOL_VERSION} on {socket.gethostname()}. "
            "Install the same version on all nodes"
        )
    return bytes(nonce)


def _own_versions() -> dict[str, str]:
    """Return the versions that must be equal in the driver and the workers, in the order of the comparison."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"drivetrain": __version__, "Python": python}


def _require_same_versions(theirs: Mapping[str, Any]) -> None:
    """Check that a worker has the same versions of drivetrain and Python as the driver.

    Raises:
        ConfigurationError: a version differs. The message names the first version that differs.
    """
    for name, own in _own_versions().items():
        if theirs.get(name) != own:
            raise ConfigurationError(
                f"[DT-306] worker {theirs.get('number')!r} on host {theirs.get('host')!r}: expected {name} {own}, "
                f"as in the driver, got {theirs.get(name)!r}. Install the same version on all nodes"
            )


def _configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
