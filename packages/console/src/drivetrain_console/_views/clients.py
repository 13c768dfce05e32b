"""Limits on the clients of the runs server: their number, and the time for each request."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["DeadlineReader", "LimitedServer"]

_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 5\r\n\r\n"


class LimitedServer(ThreadingHTTPServer):
    """An HTTP server with a thread for each client, and a maximum number of clients.

    When a client connects while the maximum is reached, the server closes the connection whose client has been sending
    its request for the longest time, so slow or silent clients cannot block others. If all connected clients have sent
    their requests, the new client is rejected.

    Attributes:
        max_clients: the maximum number of clients, each with one connection.
    """

    daemon_threads = True
    block_on_close = False  # unnecessary, because each stream of events ends within one polling interval
    request_queue_size = 64
    max_clients = 128

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, bool] = {}  # True if the client is still sending its request; oldest first
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a client, or reject the client."""
        if self._admit(request):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_REFUSAL)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def set_sending(self, client: socket.socket, *, sending: bool) -> None:
        """Record whether a client is still sending a request."""
        with self._lock:
            if client in self._clients:
                del self._clients[client]
                self._clients[client] = sending

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: errors of clients do not concern the user of the terminal."""

    def _admit(self, client: socket.socket) -> bool:
        with self._lock:
            if len(self._clients) >= self.max_clients:
                slowest = next((other for other, sending in self._clients.items() if sending), None)
                if slowest is None:
                    return False
                del self._clients[slowest]
                with contextlib.suppress(OSError):  # the client's thread notices this and closes the connection
                    slowest.shutdown(socket.SHUT_RDWR)
            self._clients[client] = True
            return True


class DeadlineReader(io.RawIOBase):
    """Reads the requests of a client, with a limit on the total time for each request.

    Args:
        client: the connection.
        limit_s: the time limit for a request in seconds.
    """

    def __init__(self, client: socket.socket, limit_s: float) -> None:
        self._client = client
        self._limit_s = limit_s
        self._deadline = 0.0
        self.start()

    def start(self) -> None:
        """Start the time limit of the next request."""
        self._deadline = time.monotonic() + self._limit_s

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the available bytes.

        Raises:
            TimeoutError: the time limit has expired.
        """
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the client did not send its request within the time limit")
        self._client.settimeout(remaining)
        return self._client.recv_into(buffer)
