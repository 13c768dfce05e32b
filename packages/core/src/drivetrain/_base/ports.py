"""The TCP ports on which drivetrain and the frameworks listen."""

from __future__ import annotations

import os
import re
import socket

from drivetrain.errors import ConfigurationError, ResourceError

__all__ = ["PORTS", "listen", "port_range", "port_variables"]

PORTS = "DRIVETRAIN_PORTS"
"""The environment variable with the ports that may be used, such as ``29500-29599``."""

_MAX_PORT = 65_535


def port_range() -> range | None:
    """Return the ports that may be used; None for any port.

    Raises:
        ConfigurationError: the environment variable contains no range.
    """
    text = os.environ.get(PORTS, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,5})\s*-\s*(\d{1,5})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) <= _MAX_PORT:
        raise ConfigurationError(
            f"[DT-116] the environment variable {PORTS}: expected a range of ports, such as 29500-29599, got {text!r}"
        )
    return range(int(match[1]), int(match[2]) + 1)


def port_variables() -> dict[str, str]:
    """Return the environment variable for the workers, if it is set."""
    return {PORTS: os.environ[PORTS]} if port_range() is not None else {}


def listen(host: str, *, backlog: int) -> socket.socket:
    """Listen on a free port of an IP address (version 4 or 6) of this machine.

    Raises:
        OSError: this machine does not have the address.
        ResourceError: no port in the range is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = port_range()
    if ports is None:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    socket.create_server((host, 0), family=family).close()  # raises an error if the address is wrong
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError:
            continue
    raise ResourceError(
        f"[DT-309] {PORTS}={os.environ[PORTS]}: expected a free port of {host} in this range, got none. Widen the "
        "range, or end processes that listen on these ports"
    )
