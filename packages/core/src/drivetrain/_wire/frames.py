"""The connection between the controller and a worker: a stream socket with pickled messages, each preceded by its size.

``report`` writes to the socket from the calling thread. Once it returns, the kernel owns the bytes, so they survive the
worker's death. If the controller falls behind, ``report`` blocks, so that no queue grows in memory.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, get_args

from drivetrain._wire.events import Event

__all__ = ["Channel", "Inbox", "as_event", "frame", "receive", "receive_bytes"]

_HEADER = struct.Struct(">Q")
_EVENTS: tuple[Any, ...] = get_args(Event)
_CODES = {kind: code for code, kind in enumerate(_EVENTS)}
_READ_BYTES = 1 << 20
_UNIX_BUFFER_BYTES = 1 << 20
_TCP_BUFFER_BYTES = 1 << 16
"""The sizes of the kernel's buffers limit how many reports the controller can be behind: a few thousand small ones per
rank. The kernel counts some 700 bytes for each message on a Unix socket in addition to its data, and none on TCP."""


def frame(message: Any) -> bytes:
    """Encode a message as the bytes to send."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """Wait for a whole message, up to the socket's timeout. Return None if the other end closed the connection."""
    header = receive_bytes(connection, _HEADER.size)
    if header is None:
        return None
    body = receive_bytes(connection, _HEADER.unpack(header)[0])
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

    def send(self, message: Any) -> None:
        """Send a message. Block while the other end is too far behind."""
        data = frame(message)
        with self._lock:
            self._socket.sendall(data)

    def send_event(self, event: Event) -> None:
        """Send an event. The receiver decodes it with :func:`as_event`."""
        self.send((_CODES[type(event)], *event))

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message arrives."""
        return self._socket.fileno()

    def receive(self) -> Any:
        """Wait for the next message. Return None if the other end closed the connection."""
        return receive(self._socket)


class Inbox:
    """The controller's end of the connection. It never blocks: it reads only the available bytes."""

    def __init__(self, connection: socket.socket) -> None:
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
        data = self._data
        data += part
        start, end = 0, len(data)
        with memoryview(data) as view:
            while end - start >= _HEADER.size:
                stop = start + _HEADER.size + _HEADER.unpack_from(view, start)[0]
                if stop > end:
                    break
                message = pickle.loads(view[start + _HEADER.size : stop])
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
    return _EVENTS[code](*message[1:]) if isinstance(code, int) else None
