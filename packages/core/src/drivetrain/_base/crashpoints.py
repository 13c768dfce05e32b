"""Named points of the storage protocol at which a test can kill processes: see :mod:`drivetrain_testing._crash`.

Outside such a test, reaching a point costs one lookup in the environment.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ADDRESS", "POINTS", "reach", "reach_replacement", "socket_address"]

ADDRESS = "DRIVETRAIN_CRASH_ADDRESS"
"""The environment variable with the path of the socket on which the test harness listens."""

POINTS = (
    "before upload",
    "mid-file",
    "after upload",
    "before manifest write",
    "during manifest write",
    "after manifest write",
    "during retention",
    "during sweep",
)


def reach(point: str) -> None:
    """Tell the test harness, if there is one, that this process is at a crash point. Block until it responds."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return
    with socket.socket(socket.AF_UNIX) as connection, socket_address(Path(address)) as short:
        connection.settimeout(60.0)
        connection.connect(short)
        connection.sendall(f"{os.getpid()} {point}\n".encode())
        connection.recv(1)


def reach_replacement(path: str) -> None:
    """Reach a point if a file that is about to be replaced is a manifest. Its new content is not visible yet."""
    if path.endswith("manifest.json"):
        reach("during manifest write")


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Give the address of a Unix socket whose path may be longer than the 107 bytes that an address can have.

    Args:
        path: the path of the socket, in a directory that exists.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
