"""The address on which the driver waits for the workers."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from drivetrain import ConfigurationError

__all__ = ["own_address"]

_ANYWHERE = "203.0.113.1"  # reserved for documentation; no packet is sent
_DISCARD_PORT = 9


def own_address(hosts: Sequence[str]) -> str:
    """Return the IP address of this machine that other machines can reach.

    Args:
        hosts: the hosts of the workers, possibly with user names. The address is on the network of the first host that
            is another machine. Without hosts, it is on the network of the default route.

    Raises:
        ConfigurationError: workers are on other machines, but this machine only has the loopback address.
    """
    names = [host.rpartition("@")[2] for host in hosts]
    are_local = bool(names)
    for name in dict.fromkeys(names):
        address = _address_towards(name)
        if address is not None and not _is_loopback(address):
            return address
        are_local = are_local and address is not None
    if are_local:
        return "127.0.0.1"
    address = _address_towards(_ANYWHERE) or _address_towards(socket.gethostname()) or "127.0.0.1"
    if names and _is_loopback(address):
        raise ConfigurationError(
            f"[DT-113] CommandRuntime: expected an address that {names[0]!r} can reach, got only {address}. Set host "
            "to an IP address of this machine"
        )
    return address


def _address_towards(name: str) -> str | None:
    """Return the IP address from which this machine would send packets to a host; None if the host is unreachable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((name, _DISCARD_PORT))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
