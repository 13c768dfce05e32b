"""Helpers for backends: free ports, temporary environment variables, values of a process, and the GPUs of a node."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from drivetrain._base.ports import PORTS, port_range
from drivetrain._hooks.context import WorkerInfo
from drivetrain.errors import ResourceError

__all__ = [
    "ProcessValue",
    "node_accelerators",
    "port_to_bind",
    "reserve_port",
    "temporary_environment",
    "worker_threads",
]

T = TypeVar("T")

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_UNPRIVILEGED = 1_024
_PORTS = 10_000
_ATTEMPTS = 200

_reserved: list[tuple[int, socket.socket]] = []
_values: dict[str, Any] = {}


def reserve_port() -> int:
    """Return a free TCP port of this machine, and reserve it until this process exits.

    For frameworks that expect a port number and bind the port much later. ``DRIVETRAIN_PORTS`` selects the ports. The
    kernel does not give the port to other processes, because the port is below the ephemeral range, unless that range
    begins at the lowest ports. Other workers of this machine do not get it, because this process binds an abstract
    socket address for the port number, and only one process can bind this address at a time.

    Raises:
        ResourceError: no free port was found.
    """
    ports = port_range() or _ports_below_the_ephemeral()
    for port in random.SystemRandom().sample(ports, min(len(ports), _ATTEMPTS)):
        name = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # another process has reserved the port
            name.bind(f"\0drivetrain-port-{port}")
            if _is_free(port):
                _reserved.append((port, name))
                return port
        name.close()
    for port, _ in _reserved:  # a process that serves many runs uses its ports again
        if port in ports and _is_free(port):
            return port
    raise ResourceError(
        f"[DT-309] expected a free port from {ports.start} to {ports.stop - 1}, got none in {_ATTEMPTS} attempts. End "
        f"processes that listen on ports of this machine, or select other ports with {PORTS}"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def port_to_bind() -> int:
    """Return a reserved port of ``DRIVETRAIN_PORTS``, or 0, with which a framework binds a port that is free.

    Raises:
        ResourceError: no port in the range is free.
    """
    return 0 if port_range() is None else reserve_port()


def _ports_below_the_ephemeral() -> range:
    first_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0])
    low = max(_FIRST_UNPRIVILEGED, first_ephemeral - _PORTS)
    return range(low, first_ephemeral if first_ephemeral - low >= _ATTEMPTS else low + _PORTS)


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process during a ``with`` block, and restore their previous values afterwards.

    Args:
        variables: the values by name.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def worker_threads() -> int | None:
    """Return the number of CPUs of this worker, which the runtime sets as ``OMP_NUM_THREADS``; None if it is not set.

    A framework that was imported before the variable was set needs this number for its own setting.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdecimal() and int(threads) else None


def node_accelerators(workers: Sequence[WorkerInfo]) -> list[str]:
    """Return, for each worker, the GPUs of all workers on its node, in the format of ``CUDA_VISIBLE_DEVICES``.

    If each worker has one GPU, the position of a worker's GPU in its string is the worker's local rank, as under
    torchrun. Scripts and libraries can therefore use the device with that index, and NCCL can use direct paths between
    the GPUs of a node.

    Args:
        workers: all workers of the group, in the order of their ranks.
    """
    of_node: dict[str, dict[str, None]] = {}
    for worker in workers:
        of_node.setdefault(worker.node_id, {}).update(dict.fromkeys(worker.accelerator_ids))
    return [",".join(of_node[worker.node_id]) for worker in workers]


class ProcessValue(Generic[T]):
    """A value that all copies of this object in one process share, such as a server that a backend has started.

    A backend is pickled for every call in a worker. A server that a function called by
    :meth:`WorkerGroup.run() <drivetrain.plugin.backends.WorkerGroup.run>` starts would end with its copy of the
    backend. A ``ProcessValue`` keeps it: it is pickled as its name, and every copy refers to the value of the process
    in which the copy is.

    Args:
        name: identifies the value in a process. Begin it with the name of your package.

    Example:
        >>> server = ProcessValue("my_package.server")
        >>> server.value is None
        True
        >>> server.value = "a server"
        >>> ProcessValue("my_package.server").value
        'a server'
        >>> server.value = None
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def value(self) -> T | None:
        """The value in this process; None if it was not set."""
        return _values.get(self.name)

    @value.setter
    def value(self, value: T | None) -> None:
        if value is None:
            _values.pop(self.name, None)
        else:
            _values[self.name] = value
