"""The process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["is_trusted", "peer_pid", "peer_uid"]


def peer_pid(connection: socket.socket) -> int:
    """Return the process id at the other end of a Unix socket; 0 if it is in another namespace."""
    return _credentials(connection)[0]


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    return _credentials(connection)[1]


def is_trusted(connection: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket belongs to this user or to root."""
    return peer_uid(connection) in (0, os.getuid())


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid
