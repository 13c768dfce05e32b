"""Named points of the storage protocol at which a test may end processes: see :mod:`drivetrain.testing.crash`.

Outside such a test a point costs one look at the environment.
"""

from __future__ import annotations

import os
import socket

__all__ = ["ADDRESS", "POINTS", "is_armed", "reach"]

ADDRESS = "DRIVETRAIN_CRASH_ADDRESS"
"""The variable with the path of the socket at which a harness listens."""

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


def is_armed() -> bool:
    """Whether a harness listens."""
    return ADDRESS in os.environ


def reach(point: str) -> None:
    """Tells a harness, if one listens, that this process has come to a point, and waits until it may go on."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60.0)
        line.connect(address)
        line.sendall(f"{os.getpid()} {point}\n".encode())
        line.recv(1)
