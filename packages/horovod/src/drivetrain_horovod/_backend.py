"""Sets up Horovod: a rendezvous server on rank 0, and the variables that ``hvd.init()`` reads on every rank."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from drivetrain import ConfigurationError, FailureKind, PluginError, TrainContext
from drivetrain.plugin import Backend, WorkerInfo
from drivetrain.plugin.backends import (
    ProcessValue,
    WorkerGroup,
    node_accelerators,
    temporary_environment,
    worker_threads,
)
from drivetrain_horovod._built import BUILD, explain, find_build
from drivetrain_horovod._elastic import ElasticRendezvous

__all__ = ["HorovodBackend"]

_LOG_LEVELS = ("error", "warning", "info", "trace")
_LOOPBACK = "127.0.0.1"

_server = ProcessValue[Any]("drivetrain_horovod.server")
"""The rendezvous server on rank 0; None on other ranks. Process sets that are added during training need it too."""


@dataclass(kw_only=True)
class HorovodBackend(Backend):
    """The backend configured by :class:`~drivetrain_horovod.HorovodConfig`.

    Attributes:
        nics: the names of network interfaces to use, in order of preference, or None to choose the interface by the
            worker's address.
        verbose: the level of Horovod's log.
        timeout_s: time limit in seconds for surviving ranks to wait for each other after a rank is lost.
        operation_timeout_s: time limit in seconds for the ranks to connect to each other, and for each operation of
            Gloo.
        preload: see :class:`~drivetrain.plugin.Backend`.
        warmup: see :class:`~drivetrain.plugin.Backend`.
        survives_losses: see :class:`~drivetrain.plugin.Backend`.
    """

    nics: tuple[str, ...] | None
    verbose: int
    timeout_s: int
    operation_timeout_s: int
    preload: Sequence[str] = ()
    warmup: Sequence[str] = ()
    survives_losses: bool = False
    _elastic: ElasticRendezvous | None = field(default=None, init=False, repr=False, compare=False)
    _mappings: list[dict[str, str]] = field(default_factory=list, init=False, repr=False, compare=False)

    name = "horovod"

    def classify(self, error: BaseException) -> FailureKind | None:
        """Recognize the exceptions of PyTorch and TensorFlow for memory that runs out, without importing either."""
        names = {kind.__name__ for kind in type(error).__mro__}
        return FailureKind.OUT_OF_MEMORY if names & {"OutOfMemoryError", "ResourceExhaustedError"} else None

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Check the Horovod build and the network of every worker, and start Horovod's rendezvous server on rank 0."""
        workers = group.workers
        inspected = group.run(_inspect_worker)
        for worker, (built, _) in zip(workers, inspected, strict=True):
            _check_build(worker, built)
        is_single_node = len({worker.node_id for worker in workers}) == 1
        interfaces = [
            self._choose_interface(worker, addresses, is_single_node=is_single_node)
            for worker, (_, addresses) in zip(workers, inspected, strict=True)
        ]
        slots = _slots(workers)
        shared = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.operation_timeout_s),
        }
        plan, verbose = [tuple(slot.values()) for slot in slots], max(0, self.verbose - 1)
        if len(workers) > 1 and self.survives_losses:
            self._elastic = ElasticRendezvous(plan, workers[0].ip, self.timeout_s, verbose)
            shared["HOROVOD_ELASTIC"] = "1"
            shared["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = self._elastic.server.address
            shared["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(self._elastic.server.port)
        elif len(workers) > 1:
            (port,) = group.run(_serve, interfaces[0][1], plan, verbose, ranks=[0])
            shared["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = interfaces[0][1] or workers[0].ip
            shared["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        rendezvous = self._mappings = []
        for slot, (interface, _), gpus in zip(slots, interfaces, node_accelerators(workers), strict=True):
            mapping = {f"HOROVOD_{name}": str(value) for name, value in slot.items()} | shared
            if gpus:
                mapping["CUDA_VISIBLE_DEVICES"] = gpus
            if interface:
                mapping["HOROVOD_GLOO_IFACE"] = interface
            if self.nics is not None:
                mapping["NCCL_SOCKET_IFNAME"] = interface
            rendezvous.append(mapping)
        return rendezvous

    def rejoin(self, group: WorkerGroup, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        """Make the surviving ranks and the new processes connect again. Horovod's rank 0 will be a surviving rank."""
        assert self._elastic is not None
        mappings = [self._mappings[rank] for rank in lost]
        places = [(mapping["HOROVOD_HOSTNAME"], int(mapping["HOROVOD_LOCAL_RANK"])) for mapping in mappings]
        return self._elastic.rejoin(
            places,
            lambda slots: [
                {**mapping, "HOROVOD_RANK": str(slot.rank)} for mapping, slot in zip(mappings, slots, strict=True)
            ],
        )

    def close(self) -> None:
        """Stop the rendezvous server in the driver, if there is one."""
        elastic, self._elastic = self._elastic, None
        if elastic is not None:
            elastic.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_elastic": None}  # the server stays in the driver

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Set Horovod's environment variables. If the train function returns without ``hvd.shutdown()``, call it.

        After the shutdown, a peer that still waits for this rank in a collective operation gets an error at once. If
        the train function raises an exception, Horovod is not shut down, so that the exception is reported before the
        errors that the shutdown would cause on the peers.
        """
        level = os.environ.get("HOROVOD_LOG_LEVEL", _LOG_LEVELS[min(self.verbose, len(_LOG_LEVELS) - 1)])
        with temporary_environment({**rendezvous, "HOROVOD_LOG_LEVEL": level}), _threads():
            try:
                yield
            except BaseException as error:
                if context.get_world_size() == 1:  # a single worker may run in the driver's process, which continues
                    _shut_down()
                if (explanation := explain(error)) is not None:
                    raise PluginError(explanation) from error
                raise
            _shut_down()

    def _choose_interface(
        self, worker: WorkerInfo, addresses: Mapping[str, Sequence[str]], *, is_single_node: bool
    ) -> tuple[str, str]:
        """Return the name and the address of the network interface that a worker should use.

        Empty strings leave the choice to Gloo.

        Args:
            worker: the worker.
            addresses: the addresses of each network interface of the worker, by the interface's name.
            is_single_node: True if all workers are on one machine.
        """
        if self.nics is not None:
            for name in self.nics:
                if name in addresses:
                    return name, next(iter(addresses[name]), "")
            raise ConfigurationError(
                f"HorovodConfig(nics=...): expected a network interface that every worker has, got "
                f"{', '.join(self.nics)}, but rank {worker.rank} ({worker.hostname}) only has "
                f"{', '.join(sorted(addresses))}. Use an interface that exists on every worker"
            )
        address = _LOOPBACK if is_single_node else worker.ip
        return next(((name, address) for name, own in addresses.items() if address in own), ("", ""))


def _slots(workers: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """Return the slot of each rank: the values by which Horovod describes the rank's place among all ranks.

    ``CROSS_RANK`` and ``CROSS_SIZE`` refer to the worker's cross group: all workers, on any node, with the same local
    rank.
    """
    local_sizes = Counter(worker.node_id for worker in workers)
    cross_sizes = Counter(worker.local_rank for worker in workers)
    return [
        {
            "HOSTNAME": worker.node_id,  # identifies the node; Horovod does not look up this name
            "RANK": worker.rank,
            "LOCAL_RANK": worker.local_rank,
            "CROSS_RANK": sum(other.local_rank == worker.local_rank for other in workers[: worker.rank]),
            "SIZE": len(workers),
            "LOCAL_SIZE": local_sizes[worker.node_id],
            "CROSS_SIZE": cross_sizes[worker.local_rank],
        }
        for worker in workers
    ]


def _check_build(worker: WorkerInfo, built: Mapping[str, str] | None) -> None:
    if built:
        return
    actual = "none" if built is None else "one that was built without a framework"
    raise PluginError(
        f"the horovod backend: expected Horovod on every worker, built with the framework that it uses, got {actual} "
        f"on rank {worker.rank} ({worker.hostname}). For torch, run there: {BUILD}"
    )


def _inspect_worker() -> tuple[dict[str, str] | None, dict[str, list[str]]]:
    """Return how this worker's Horovod was built, and the IPv4 addresses of the worker's network interfaces by name."""
    built = find_build()
    if not built:
        return built, {}
    from socket import AF_INET

    import psutil  # a dependency of Horovod

    addresses = {
        name: [entry.address for entry in entries if entry.family == AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return built, addresses


def _serve(address: str, slots: Sequence[tuple[Any, ...]], verbose: int) -> int:
    """Start the rendezvous server in this process, on an address of this machine. Return the server's port."""
    from horovod.runner.common.util.hosts import SlotInfo

    from drivetrain_horovod._rendezvous import Handler, Server

    if _server.value is not None:  # of an earlier run in this process
        _server.value.close()
    _server.value = Server(address, Handler, [SlotInfo(*slot) for slot in slots], verbose)
    return _server.value.port


def _shut_down() -> None:
    for framework in ("torch", "tensorflow", "mxnet"):
        hvd = sys.modules.get(f"horovod.{framework}")
        if hvd is not None and hasattr(hvd, "is_initialized") and hvd.is_initialized():
            hvd.shutdown()


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """If torch is imported, set its number of threads to ``OMP_NUM_THREADS`` during a ``with`` block.

    This is needed if torch was imported before the variable was set.
    """
    torch = sys.modules.get("torch")
    threads = worker_threads()
    if torch is None or threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
