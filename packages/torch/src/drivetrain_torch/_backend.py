"""Sets up the process group: one store on rank 0, which every rank joins."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from drivetrain import Backend, ConfigurationError, PluginError, TrainContext, WorkerGroup
from drivetrain_torch._devices import cuda_indices, get_devices, shared_gpus

__all__ = ["TorchBackend", "TorchXLABackend"]

_store: Any = None
"""The store that this process serves, if it is rank 0's: it outlives the session, as other ranks may still need it."""


@dataclass(frozen=True)
class TorchBackend(Backend):
    """What :class:`~drivetrain_torch.TorchConfig` describes.

    Attributes:
        group_backend: of the process group; None to choose by device.
        init_method: ``"env"`` or ``"tcp"``.
        timeout_s: seconds that joining, and each collective operation, may take.
    """

    group_backend: str | None
    init_method: str
    timeout_s: float

    name = "torch"
    preload = ("torch", "torch.distributed", "torch.distributed.nn")
    # Whatever touches torch's compiler, such as the first DistributedDataParallel or optimizer, imports all of it.
    warmup = ("sympy", "drivetrain_torch._warmup", "torch.distributed.fsdp")

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Has rank 0 serve a store, on a port that is free because the store is what binds it."""
        address = group.workers[0].ip
        (port,) = group.run(_serve_store, address, len(group.workers), self.timeout_s, ranks=[0])
        return [
            {"MASTER_ADDR": address, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": gpus}
            for gpus in shared_gpus(group.workers)
        ]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Joins the process group, and leaves it when the train function has returned.

        A peer that still waits for this rank in a collective then gets an error at once. After an exception the
        group stays, so that the peers' errors do not come before this one is told.
        """
        import torch
        import torch.distributed as dist

        # Defaults of its functions take the group that there is when it is imported, and would keep it, and so its
        # sockets, alive. DistributedDataParallel imports it.
        import torch.distributed.nn

        if dist.is_initialized():
            raise ConfigurationError(
                "the torch backend: expected a process without a process group, got one that was initialised before "
                "fit(): call torch.distributed.destroy_process_group() first"
            )
        self.load()
        alone = context.get_world_size() == 1
        with _environment(self._variables(context, rendezvous)), _threads():
            device = get_devices()[0]
            if device.type == "cuda":
                torch.cuda.set_device(device)
            size, address, port = context.get_world_size(), rendezvous["MASTER_ADDR"], int(rendezvous["MASTER_PORT"])
            try:
                store = _store or _open_store(address, port, size, self.timeout_s, serve=False)
                # Under a prefix, so that a group which the train function makes itself finds no keys of this one.
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
                yield
            except BaseException:
                if alone:  # this may be the driver's own process, which goes on
                    _leave()
                raise
            store.wait(["all joined"])  # a rank that still connects to this one would fail
            _leave()

    def close(self) -> None:
        """Closes the store, where the controller's process is the worker; elsewhere it ends with rank 0's process."""
        global _store
        _store = None

    def load(self) -> None:
        """Imports what the process group's backend needs beside torch."""

    def _variables(self, context: TrainContext, rendezvous: Mapping[str, str]) -> dict[str, str]:
        import torch

        variables: dict[str, str] = {}
        if self.init_method == "env":
            variables = {name: rendezvous[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
            # Has env:// connect to the store that is there, as under torchrun, and not bind its port.
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        gpus = rendezvous["CUDA_VISIBLE_DEVICES"]
        if gpus and "CUDA_VISIBLE_DEVICES" in os.environ and not _cuda_is_in_use():
            variables["CUDA_VISIBLE_DEVICES"] = gpus
        if sys.platform == "linux" and context.get_local_world_size() == context.get_world_size():
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        # Accelerate, and what is built on it, knows no other way to be told its device; without a word it takes a CPU
        # to mean that each process trains alone.
        own = cuda_indices(context.worker.accelerator_ids, {**os.environ, **variables})
        told = {"ACCELERATE_TORCH_DEVICE": f"cuda:{own[0]}" if own else "cpu"}
        if not own:
            told |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        return {**variables, **{name: os.environ.get(name, value) for name, value in told.items()}}


class TorchXLABackend(TorchBackend):
    """What :class:`~drivetrain_torch.TorchXLAConfig` describes."""

    name = "torch_xla"

    def load(self) -> None:
        """Imports torch_xla, which registers the ``xla`` process group."""
        try:
            importlib.import_module("torch_xla.distributed.xla_backend")
        except ModuleNotFoundError as error:
            if error.name != "torch_xla":
                raise
            raise PluginError(
                "TorchXLAConfig: expected the package torch_xla on every worker, found none: run pip install torch_xla"
            ) from error


def _cuda_is_in_use() -> bool:
    """Whether CUDA has looked at its variables in this process, and so does not again."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _serve_store(address: str, world_size: int, timeout_s: float) -> int:
    global _store
    _store = _open_store(address, 0, world_size, timeout_s, serve=True)
    port: int = _store.port
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
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables, and puts back what was there."""
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


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Gives torch as many threads as ``OMP_NUM_THREADS`` says: it may have been imported before that was set."""
    import torch

    before = torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    torch.set_num_threads(int(asked) if asked.isdecimal() and int(asked) else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
