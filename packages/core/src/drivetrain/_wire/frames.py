"""The connection between the controller and a worker: a stream socket with pickled messages, each preceded by its size.

On a network, each message is followed by a message authentication code (MAC), which only the two ends can compute. The
receiver checks it before it unpickles the message. A code depends on the number of the message, so that no message can
be repeated, left out or moved. On one machine, the ends are connected by a pair of sockets that no other process can
reach, and there are no codes.

``report`` writes to the socket from the calling thread. Once it returns, the kernel owns the bytes, so they survive the
worker's death. If the controller falls behind, ``report`` blocks, so that no queue grows in memory.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, get_args

from drivetrain._wire.events import Event

__all__ = [
    "MAC_BYTES",
    "AuthenticatedSocket",
    "Channel",
    "Inbox",
    "Seal",
    "as_event",
    "frame",
    "receive",
    "receive_bytes",
    "sealed",
    "send_message",
]

_Bytes = bytes | bytearray | memoryview

MAC_BYTES = 16
_HEADER = struct.Struct(">Q")
_EVENTS: tuple[Any, ...] = get_args(Event)
_CODES = {kind: code for code, kind in enumerate(_EVENTS)}
_READ_BYTES = 1 << 20
_UNIX_BUFFER_BYTES = 1 << 20
_TCP_BUFFER_BYTES = 1 << 16
"""The sizes of the kernel's buffers limit how many reports the controller can be behind: a few thousand small ones per
rank. The kernel counts some 700 bytes for each message on a Unix socket in addition to its data, and none on TCP."""

_MIN_BUFFER_BYTES = 1 << 15
_RANKS_WITH_FULL_BUFFER = 4


class Seal:
    """Computes the codes of the messages in one direction of a connection, one after the other.

    Args:
        key: a secret of 32 bytes, which is used for this direction of this connection only.
    """

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, data: _Bytes) -> bytes:
        """Return the code of the next message."""
        number = self._count.to_bytes(16, "big")
        self._count += 1
        return blake2b(data, digest_size=MAC_BYTES, key=self._key, salt=number).digest()

    def matches(self, data: _Bytes, code: _Bytes) -> bool:
        """Return True if this is the code of the next message."""
        return compare_digest(self.next(data), code)


class AuthenticatedSocket(socket.socket):
    """A socket whose messages are authenticated.

    Args:
        connection: a socket, which this one replaces.
        outgoing: computes the codes of messages that are sent.
        incoming: computes the codes of messages that are received.
    """

    def __init__(self, connection: socket.socket, outgoing: Seal, incoming: Seal) -> None:
        timeout = connection.gettimeout()
        super().__init__(fileno=connection.detach())
        self.settimeout(timeout)
        self.outgoing = outgoing
        self.incoming = incoming
        self.sending = threading.Lock()


def frame(message: Any) -> bytes:
    """Encode a message as bytes."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body)) + body


def sealed(connection: socket.socket, data: bytes) -> bytes:
    """Return the bytes to send over a connection for an encoded message: with a code, if the connection has codes."""
    return data + connection.outgoing.next(data) if isinstance(connection, AuthenticatedSocket) else data


def send_message(connection: socket.socket, message: Any) -> None:
    """Send a message. Several threads may do so at the same time over an authenticated connection."""
    data = frame(message)
    if isinstance(connection, AuthenticatedSocket):
        with connection.sending:
            connection.sendall(sealed(connection, data))
    else:
        connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """Wait for a whole message, up to the socket's timeout. Return None if the other end closed the connection.

    Raises:
        ConnectionError: the message does not come from the other end of the connection.
    """
    header = receive_bytes(connection, _HEADER.size)
    if header is None:
        return None
    body = receive_bytes(connection, _HEADER.unpack(header)[0])
    if isinstance(connection, AuthenticatedSocket):
        code = receive_bytes(connection, MAC_BYTES)
        if body is None or code is None:
            return None
        if not connection.incoming.matches(header + body, code):
            raise ConnectionError("a message with a wrong authentication code arrived")
    return None if body is None else pickle.loads(body)


def receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    """Wait for a number of bytes, up to the socket's timeout. Return None if the other end closed the connection."""
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(min(size - len(data), _READ_BYTES))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


class Channel:
    """The worker's end of the connection. Its socket is in blocking mode."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _buffer_bytes(connection))
        self._socket = connection
        self._lock = threading.Lock()

    def share_among(self, ranks: int) -> None:
        """Limit how far this rank can be ahead of the controller, if it receives the reports of many ranks.

        A rank that is too far ahead waits until the controller has also taken the messages of the other ranks.
        """
        size = _buffer_bytes(self._socket) * _RANKS_WITH_FULL_BUFFER // max(ranks, _RANKS_WITH_FULL_BUFFER)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(_MIN_BUFFER_BYTES, size))

    def send(self, message: Any) -> None:
        """Send a message. Block while the other end is too far behind."""
        data = frame(message)
        with self._lock:
            self._socket.sendall(sealed(self._socket, data))

    def send_event(self, event: Event) -> None:
        """Send an event. The receiver decodes it with :func:`as_event`."""
        self.send((_CODES[type(event)], *event))

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message arrives."""
        return self._socket.fileno()

    def receive(self) -> Any:
        """Wait for the next message. Return None if the other end closed the connection.

        Raises:
            ConnectionError: the message does not come from the other end of the connection.
        """
        return receive(self._socket)


class Inbox:
    """The controller's end of the connection. It never blocks: it reads only the available bytes.

    A message with a wrong code closes the connection, like an error of the network.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._incoming = connection.incoming if isinstance(connection, AuthenticatedSocket) else None
        self._overhead = _HEADER.size + (MAC_BYTES if self._incoming else 0)
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _buffer_bytes(connection))
        self.socket = connection
        self.closed = False
        self._data = bytearray()

    def read(self) -> Iterator[Any]:
        """Read once without waiting, and yield the complete messages."""
        try:
            part = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            part = b""
        if not part:
            self.closed = True
            return
        data, incoming, overhead = self._data, self._incoming, self._overhead
        data += part
        start, end = 0, len(data)
        with memoryview(data) as view:
            while end - start >= _HEADER.size:
                size = _HEADER.unpack_from(view, start)[0]
                stop = start + overhead + size
                if stop > end:
                    break
                body = start + _HEADER.size
                if incoming is not None and not incoming.matches(view[start : body + size], view[body + size : stop]):
                    self.closed = True
                    return
                message = pickle.loads(view[body : body + size])
                start = stop
                yield message
        del data[:start]

    def read_rest(self) -> Iterator[Any]:
        """Yield the remaining messages of a worker that has exited."""
        while not self.closed:
            size_before = len(self._data)
            messages = list(self.read())
            yield from messages
            if not messages and len(self._data) == size_before:
                return


def _buffer_bytes(connection: socket.socket) -> int:
    return _UNIX_BUFFER_BYTES if connection.family == socket.AF_UNIX else _TCP_BUFFER_BYTES


def as_event(message: Any) -> Event | None:
    """Return the event in a message, or None if it is the result of a call."""
    code = message[0]
    return tuple.__new__(_EVENTS[code], message[1:]) if isinstance(code, int) else None
