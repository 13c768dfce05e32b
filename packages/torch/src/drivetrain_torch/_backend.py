"""Sets up the process group: rank 0 serves a key-value store, and every rank connects to this store."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from drivetrain import ConfigurationError, FailureKind, PluginError, TrainContext
from drivetrain.plugin import Backend
from drivetrain.plugin.backends import (
    ProcessValue,
    WorkerGroup,
    node_accelerators,
    port_to_bind,
    temporary_environment,
    visible_gpus,
    worker_threads,
)
from drivetrain_torch._devices import cuda_indices, get_devices
from drivetrain_torch._framework import WARMUP, group_variables

__all__ = ["JoinedGroup", "TorchBackend", "TorchXLABackend", "joined_group"]


@dataclass
class JoinedGroup:
    """The process group that the train function on this rank has joined.

    Attributes:
        store: the store of the group.
        rank: this rank.
        initial_seed: the seed of torch's random numbers at the start of the train function.
        agreements: the number of calls of :meth:`from_rank_0`.
    """

    store: Any
    rank: int
    initial_seed: int
    agreements: int = 0

    def from_rank_0(self, value: int) -> int:
        """Return the value of rank 0. Rank 0 does not wait for the other ranks."""
        key = f"agreement {self.agreements}"
        self.agreements += 1
        if self.rank == 0:
            self.store.set(key, str(value))
            return value
        return int(self.store.get(key))


joined_group = ProcessValue[JoinedGroup]("drivetrain_torch.group")
"""The process group that this process has joined, or None."""

_store = ProcessValue[Any]("drivetrain_torch.store")
"""The store that rank 0 serves; None on other ranks. It outlives the session because other ranks may still need it."""


@dataclass(frozen=True)
class TorchBackend(Backend):
    """The backend configured by :class:`~drivetrain_torch.TorchConfig`.

    Attributes:
        group_backend: the backend of the process group, or None for NCCL on GPUs and Gloo on CPUs.
        init_method: ``"env"`` or ``"tcp"``; see :class:`~drivetrain_torch.TorchConfig`.
        timeout_s: time limit in seconds for joining the group and for each collective operation.
    """

    group_backend: str | None
    init_method: str
    timeout_s: float

    name = "torch"
    preload = ("torch", "torch.distributed", "torch.distributed.nn")
    warmup = WARMUP

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Start the store on rank 0, and return its address and the visible GPUs for every rank.

        The store itself binds a free port, so no other process can take the port first; with ``DRIVETRAIN_PORTS``, a
        reserved one.
        """
        address = group.workers[0].ip
        (port,) = group.run(_serve_store, address, len(group.workers), self.timeout_s, ranks=[0])
        return [
            {"MASTER_ADDR": address, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": gpus}
            for gpus in node_accelerators(group.workers)
        ]

    def classify(self, error: BaseException) -> FailureKind | None:
        """Recognize PyTorch's exception for a device without free memory."""
        torch = sys.modules.get("torch")
        is_out_of_memory = torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)
        return FailureKind.OUT_OF_MEMORY if is_out_of_memory else None

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Join the process group, and leave it after the train function has returned.

        Once this rank has left, a peer that still waits for it in a collective operation gets an error at once. If the
        train function raises an exception, this rank stays in the group, so that the exception is reported before the
        errors that leaving would cause on the peers.
        """
        import torch
        import torch.distributed as dist

        # Default arguments in torch.distributed.nn capture the process group that exists when that module is imported.
        # This would keep the group and its sockets open. DistributedDataParallel imports the module when there is a
        # group, so import it here, before there is one.
        import torch.distributed.nn

        if dist.is_initialized():
            raise ConfigurationError(
                "[DT-130] the torch backend: expected no process group, got one initialized before fit(). Call "
                "torch.distributed.destroy_process_group() first"
            )
        self.load()
        alone = context.get_world_size() == 1
        with temporary_environment(self._variables(context, rendezvous)), _threads():
            device = get_devices()[0]
            if device.type == "cuda":
                torch.cuda.set_device(device)
            size, address, port = context.get_world_size(), rendezvous["MASTER_ADDR"], int(rendezvous["MASTER_PORT"])
            try:
                store = _store.value or _open_store(address, port, size, self.timeout_s, serve=False)
                # The prefix separates the keys of this group from those of a group that the train function creates.
                store = dist.PrefixStore("drivetrain", store)  # type: ignore[attr-defined]
                dist.init_process_group(
                    self.group_backend or ("nccl" if device.type == "cuda" else "gloo"),
                    store=store,
                    rank=context.get_world_rank(),
                    world_size=size,
                    timeout=timedelta(seconds=self.timeout_s),
                )
                if store.add("joined", 1) == size:
                    store.set("all joined", "")
                joined_group.value = JoinedGroup(store, context.get_world_rank(), torch.initial_seed())
                yield
            except BaseException:
                if alone:  # a single worker may run in the driver's process, which continues
                    _leave()
                raise
            finally:
                joined_group.value = None
            store.wait(["all joined"])  # ranks that are still connecting to this rank would fail if it left now
            _leave()

    def close(self) -> None:
        """Close the store if it is in the controller's own process. Otherwise, the store closes when rank 0 exits."""
        _store.value = None

    def load(self) -> None:
        """Import the modules that the process group's backend needs in addition to torch. This class needs none."""

    def _variables(self, context: TrainContext, rendezvous: Mapping[str, str]) -> dict[str, str]:
        import torch

        variables = group_variables(context)
        if self.init_method == "env":
            variables |= {name: rendezvous[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
            # Make env:// connect to the existing store, as under torchrun. Otherwise, rank 0 would start a second store
            # on the same port.
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        gpus = rendezvous["CUDA_VISIBLE_DEVICES"]
        if gpus and "CUDA_VISIBLE_DEVICES" in os.environ and not _cuda_is_in_use():
            variables["CUDA_VISIBLE_DEVICES"] = gpus
        # Accelerate, and libraries built on it, take the device only from these environment variables. Without them,
        # Accelerate assumes that each process on a CPU trains alone.
        own = cuda_indices(context.worker.accelerator_ids, {**os.environ, **variables})
        defaults = {"ACCELERATE_TORCH_DEVICE": f"cuda:{own[0]}" if own else "cpu"}
        if not own:
            defaults |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        if not own and visible_gpus():
            defaults |= {"LT_ACCELERATOR": "cpu"}  # otherwise, Fabric would use the GPUs of the machine
        return {**variables, **{name: os.environ.get(name, value) for name, value in defaults.items()}}


class TorchXLABackend(TorchBackend):
    """The backend configured by :class:`~drivetrain_torch.TorchXLAConfig`."""

    name = "torch_xla"

    def load(self) -> None:
        """Import torch_xla, which registers ``xla`` as a backend of process groups."""
        try:
            importlib.import_module("torch_xla.distributed.xla_backend")
        except ModuleNotFoundError as error:
            if error.name != "torch_xla":
                raise
            raise PluginError(
                "[DT-602] TorchXLAConfig requires torch_xla on every worker, which is not installed. Run: pip install "
                "torch_xla"
            ) from error


def _cuda_is_in_use() -> bool:
    """Return True if CUDA is initialized in this process, and therefore ignores changes to environment variables."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _serve_store(address: str, world_size: int, timeout_s: float) -> int:
    _store.value = store = _open_store(address, port_to_bind(), world_size, timeout_s, serve=True)
    port: int = store.port
    return port


def _open_store(address: str, port: int, world_size: int, timeout_s: float, *, serve: bool) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world_size, is_master=serve, timeout=timeout, wait_for_workers=False
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # the train function may have destroyed it
        dist.destroy_process_group()


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Set torch's number of threads to ``OMP_NUM_THREADS`` during a ``with`` block.

    This is needed if torch was imported before the variable was set.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(worker_threads() or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
