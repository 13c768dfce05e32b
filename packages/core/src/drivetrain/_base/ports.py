"""The TCP ports on which drivetrain and the frameworks listen."""

from __future__ import annotations

import os
import re
import socket

from drivetrain.errors import ConfigurationError, ResourceError

__all__ = ["PORTS", "listen", "parse_ports", "port_range", "port_variables"]

PORTS = "DRIVETRAIN_PORTS"
"""The environment variable with the ports that may be used, such as ``29500-29599``."""

_MAX_PORT = 65_535


def port_range() -> range | None:
    """Return the ports that may be used; None for any port.

    Raises:
        ConfigurationError: the environment variable contains no range.
    """
    text = os.environ.get(PORTS, "").strip()
    return parse_ports(text, f"the environment variable {PORTS}") if text else None


def parse_ports(text: str, subject: str) -> range:
    """Return the ports in a text such as ``29500-29599``.

    Args:
        text: the first and the last port, separated by a dash.
        subject: where the text comes from, for error messages.

    Raises:
        ConfigurationError: the text contains no range of ports.
    """
    match = re.fullmatch(r"(\d{1,5})\s*-\s*(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[1]) <= int(match[2]) <= _MAX_PORT:
        raise ConfigurationError(f"[DT-116] {subject}: expected a range of ports, such as 29500-29599, got {text!r}")
    return range(int(match[1]), int(match[2]) + 1)


def port_variables(ports: str | None = None) -> dict[str, str]:
    """Return the environment variable for the workers.

    Args:
        ports: its value; None for the value in this process, if it is set.
    """
    if ports is not None:
        return {PORTS: ports}
    return {PORTS: os.environ[PORTS]} if port_range() is not None else {}


def listen(host: str, *, backlog: int, ports: range | None = None) -> socket.socket:
    """Listen on a free port of an IP address (version 4 or 6) of this machine.

    Args:
        host: the IP address.
        backlog: the maximum number of connections that wait to be accepted.
        ports: the ports to choose from; None for those of the environment variable, or for any port.

    Raises:
        OSError: this machine does not have the address.
        ResourceError: no port in the range is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = ports or port_range()
    if ports is None:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    socket.create_server((host, 0), family=family).close()  # raises an error if the address is wrong
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError:
            continue
    raise ResourceError(
        f"[DT-309] {PORTS} or RunConfig(ports=...): expected a free port of {host} from {ports[0]} to {ports[-1]}, got "
        "none. Widen the range, or end processes that listen on these ports"
    )
