"""How a worker process connects to the driver and proves that it belongs to the driver's run.

The driver listens on a TCP port. A worker connects, sends the driver's token, and then introduces itself. The driver
compares the token before it unpickles anything, and closes the connection if the token is wrong.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain._wire.frames import frame, receive, receive_bytes

__all__ = ["CONNECT_WAIT_S", "DriverAddress", "Introduction", "WorkerListener", "connect_to_driver"]

CONNECT_WAIT_S = 10.0
"""How long a worker and the driver wait for each other while they connect."""

_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """Where worker processes connect to.

    Attributes:
        host: the IP address of the driver, as the workers reach it.
        port: the TCP port.
        token: the secret that a worker sends first. Never pass it on a command line, which other users of the machine
            can read. Use an environment variable, a file that only its owner can read, or a channel of the cluster.
    """

    host: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker process sends first.

    Attributes:
        index: the number under which the runtime knows the process.
        facts: the fields of :class:`drivetrain.WorkerInfo` except for the ranks and the accelerators.
        details: an object that the runtime passed to :func:`~drivetrain.plugin.worker_main`.
        stacks: a descriptor in the worker process, from which the answer to a request for its stacks can be read.
        connection: the driver's end of the connection.
    """

    index: int
    facts: Mapping[str, Any]
    details: Any
    stacks: int
    connection: socket.socket


class WorkerListener:
    """Accepts the connections of worker processes.

    Args:
        host: the IP address of this machine to listen on.
    """

    def __init__(self, host: str) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)

    @property
    def address(self) -> DriverAddress:
        """The address for :func:`~drivetrain.plugin.worker_main`."""
        host, port = self._listener.getsockname()[:2]
        return DriverAddress(host, port, self._token)

    def fileno(self) -> int:
        """The descriptor that can be read when a process connects."""
        return self._listener.fileno()

    def accept(self) -> Introduction | None:
        """Returns the next worker process, or None if nobody is connecting or the token is wrong."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # a nested wait has accepted it already
            return None
        connection.settimeout(CONNECT_WAIT_S)
        try:
            sent = receive_bytes(connection, _TOKEN_BYTES)
            is_ours = sent is not None and hmac.compare_digest(sent, self._token)
            message = receive(connection) if is_ours else None
        except OSError:
            message = None
        if message is None:
            connection.close()
            return None
        _configure(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        index, facts, details, stacks = message
        return Introduction(index, facts, details, stacks, connection)

    def close(self) -> None:
        """Stops listening; connections that were accepted stay open."""
        self._listener.close()


def connect_to_driver(
    address: DriverAddress, index: int, *, node_id: str | None, ip: str | None, details: Any, stacks: int
) -> socket.socket:
    """Connects to the driver, and introduces this process; see :class:`Introduction`.

    Raises:
        ConnectionError: the driver is unreachable.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout=CONNECT_WAIT_S)
    except OSError as error:
        raise ConnectionError(
            f"a worker on {socket.gethostname()} cannot reach the driver at {address.host}:{address.port} ({error}): "
            "open the ports of the driver's node to the cluster's nodes"
        ) from error
    _configure(connection)
    facts = {
        "node_id": node_id or socket.gethostname(),
        "hostname": socket.gethostname(),
        "ip": ip or connection.getsockname()[0],
        "pid": os.getpid(),
    }
    connection.sendall(address.token + frame((index, facts, details, stacks)))
    return connection


def _configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
