"""The actor: a worker process on a node of the cluster."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from drivetrain.plugin.runtimes import DriverAddress, worker_main

__all__ = ["Devices", "RayWorker"]

_PROGRESS_MARK = "__ray_tqdm_magic_token__"
_DEVICE_VARIABLES = ("_VISIBLE_", "_DEVICE_SELECTOR", "OMP_NUM_THREADS")


class Devices(NamedTuple):
    """The devices that Ray has assigned to an actor's process.

    Attributes:
        gpus: the ids of the GPUs.
        others: the ids of the other accelerators, by resource name.
        environment: the environment variables that select devices, such as ``CUDA_VISIBLE_DEVICES``, and
            ``OMP_NUM_THREADS``.
    """

    gpus: tuple[str, ...]
    others: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, str]


class _Output(io.TextIOWrapper):
    """Standard output without the lines that Ray's progress bars print for Ray's own reader of a process's output."""

    def write(self, text: str) -> int:
        return len(text) if _PROGRESS_MARK in text else super().write(text)


class RayWorker:
    """The class of the actors. :meth:`serve` runs on the main thread until the driver closes the connection."""

    def __init__(self, index: int, address: DriverAddress) -> None:
        self._index = index
        self._address = address

    def __repr__(self) -> str:
        return f"worker {self._index}"

    def serve(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        """Connect to the driver and execute its commands."""
        import ray

        self._replaced_output = output = sys.stdout  # kept, because it would close the buffer
        sys.stdout = _Output(output.buffer, output.encoding, output.errors, line_buffering=True)
        context = ray.get_runtime_context()
        assigned = {name: tuple(map(str, ids)) for name, ids in context.get_accelerator_ids().items() if ids}
        gpus = assigned.pop("GPU", ())
        devices = {name: value for name, value in os.environ.items() if any(part in name for part in _DEVICE_VARIABLES)}
        worker_main(
            self._address,
            self._index,
            node_id=context.get_node_id(),
            ip=ray.util.get_node_ip_address(),
            details=Devices(gpus, assigned, devices),
            preload=preload,
            environment=environment,
        )
