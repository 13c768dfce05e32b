"""What runs in an actor's process on a node of the cluster."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drivetrain.plugin import (
    Channel,
    LogFollower,
    answer_to_signal,
    collect_stacks,
    flush_output,
    frame,
    open_log,
    redirect_output,
    serve,
    settle_in,
)

__all__ = ["HELLO_WAIT_S", "Devices", "RayWorker", "join_run", "read_stacks", "set_up"]

HELLO_WAIT_S = 10.0
"""How long a worker and the driver give each other to connect."""

_GIVEN = ("_VISIBLE_", "_DEVICE_SELECTOR", "OMP_NUM_THREADS")


class Devices(NamedTuple):
    """What Ray has given a process by the resources that it holds.

    Attributes:
        gpus: ids of its GPUs.
        environment: variables that tell libraries what is theirs, such as ``CUDA_VISIBLE_DEVICES``.
    """

    gpus: tuple[str, ...]
    environment: Mapping[str, str]


class RayWorker:
    """The actor. Its one method runs on the main thread of its process until the driver closes the line."""

    def __init__(self, index: int, address: tuple[str, int], token: bytes) -> None:
        self._index = index
        self._address = address
        self._token = token

    def __repr__(self) -> str:
        return f"worker {self._index}"

    def serve(self, preload: Sequence[str]) -> None:
        """Connects to the driver and takes its commands."""
        import ray

        try:
            connection = socket.create_connection(self._address, timeout=HELLO_WAIT_S)
        except OSError as error:
            host, port = self._address
            raise ConnectionError(
                f"a worker on {socket.gethostname()} cannot reach the driver at {host}:{port} ({error}): "
                "open the ports of the driver's node to the cluster's nodes"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = ray.get_runtime_context()
        facts = {
            "node_id": context.get_node_id(),
            "hostname": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
        }
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        given = {name: value for name, value in os.environ.items() if any(part in name for part in _GIVEN)}
        connection.sendall(self._token + frame((self._index, facts, Devices(gpus, given))))
        _preload(preload)
        global _output
        channel = Channel(connection)
        _output = _Output(channel)
        serve(channel, settle_output=_output.settle)


def _preload(names: Sequence[str]) -> None:
    """Imports modules without collections, a fifth of the time; later collections leave what they made alone."""
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):  # the backend's set-up meets the same error, and tells it
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


class _Output:
    """In a worker: where its standard output and error go."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._follower: LogFollower | None = None

    def redirect(self, log: Path, rank: int, *, shown: bool) -> None:
        """Has them go to the log, and to the driver too where that shows them."""
        redirect_output(open_log(log.parent, rank))
        if self._follower is not None:
            self._follower.close()
        if shown:
            self._follower = LogFollower(log, lambda data: self._channel.send(("output", data)))

    def settle(self) -> None:
        """Waits until everything that was printed has reached the log, and the driver."""
        flush_output()
        if self._follower is not None:
            self._follower.catch_up()


_output: _Output | None = None  # one worker to a process


def set_up(
    rank: int,
    environment: Mapping[str, str],
    defaults: Mapping[str, str],
    module_path: Sequence[str],
    log: Path | None,
    shown: bool,
) -> int:
    """Makes an actor's process what the local runtime's workers are: variables, output, stacks.

    Returns:
        The descriptor, in this process, to read its stacks from.
    """
    os.environ.update(environment)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    read_end, write_end = os.pipe()
    answer_to_signal(write_end)
    join_run(rank, module_path, log, shown, time.time())
    return read_end


def join_run(rank: int, module_path: Sequence[str], log: Path | None, shown: bool, since: float) -> bool:
    """Makes the process that of a run, the first one or another.

    Returns:
        Whether the file of a module that it has imported was changed since then, by Unix time in seconds.
    """
    sys.path.extend(entry for entry in module_path if entry not in sys.path)
    # On a node that does not share the run directory, the output stays with Ray's own logs.
    if _output is not None and log is not None and log.parent.parent.exists():
        _output.redirect(log, rank, shown=shown)
    return settle_in(rank, None, since)


def read_stacks(targets: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """On a worker's node: asks processes for their stacks; by rank, a process id and a descriptor in that process."""
    with contextlib.ExitStack() as opened:
        ours: dict[int, tuple[int, int]] = {}
        for rank, (pid, descriptor) in targets.items():
            with contextlib.suppress(OSError):
                pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
                opened.callback(os.close, pipe)
                ours[rank] = (pid, pipe)
        return collect_stacks(ours)
