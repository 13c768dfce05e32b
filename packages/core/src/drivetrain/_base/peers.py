"""The user of the process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["is_trusted", "peer_uid"]


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def is_trusted(connection: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket belongs to this user or to root."""
    return peer_uid(connection) in (0, os.getuid())
