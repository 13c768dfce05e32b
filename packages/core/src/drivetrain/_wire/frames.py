"""The line between the controller and a worker: a stream socket with pickled messages, each after its length.

A worker writes a report straight into the socket from the thread that reports. Once ``report`` has returned, the
bytes are the kernel's, and the worker's death does not lose them; and a controller that falls behind slows the
workers down instead of filling anybody's memory.
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
_BUFFER_BYTES = 1 << 20


def frame(message: Any) -> bytes:
    """A message as it goes over the line."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """Waits for a whole message, as long as the socket's time limit allows; None when the other end has closed."""
    header = receive_bytes(connection, _HEADER.size)
    if header is None:
        return None
    body = receive_bytes(connection, _HEADER.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    """Waits for a number of bytes, as long as the socket's time limit allows; None when the other end has closed."""
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(min(size - len(data), _BUFFER_BYTES))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


class Channel:
    """The blocking end of the line, which the worker holds."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends a message; blocks while the other end is too far behind."""
        data = frame(message)
        with self._lock:
            self._socket.sendall(data)

    def send_event(self, event: Event) -> None:
        """Sends an event; :func:`as_event` makes it one again."""
        self.send((_CODES[type(event)], *event))

    def fileno(self) -> int:
        """The descriptor that can be read when a message comes."""
        return self._socket.fileno()

    def receive(self) -> Any:
        """The next message, or None when the other end has closed."""
        return receive(self._socket)


class Inbox:
    """The reading end of the line, which the controller holds: takes what is there, never waits for a whole message."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self.socket = connection
        self.closed = False
        self._data = bytearray()

    def read(self) -> Iterator[Any]:
        """Reads once, without waiting, and yields the messages that are complete."""
        try:
            part = self.socket.recv(_BUFFER_BYTES)
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
        """Reads everything that a worker which is gone has left in the line."""
        while not self.closed:
            before = len(self._data)
            messages = list(self.read())
            yield from messages
            if not messages and len(self._data) == before:
                return


def as_event(message: Any) -> Event | None:
    """The event that a message carries, or None if it is the result of a call."""
    code = message[0]
    return _EVENTS[code](*message[1:]) if isinstance(code, int) else None
