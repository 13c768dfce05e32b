"""Sets Horovod up: a rendezvous server on rank 0, and the variables that ``hvd.init()`` reads on every rank."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from drivetrain import Backend, ConfigurationError, PluginError, TrainContext, WorkerGroup, WorkerInfo
from drivetrain_horovod._built import BUILD, explain, find_build
from drivetrain_horovod._elastic import ElasticRendezvous

__all__ = ["HorovodBackend"]

_LOG_LEVELS = ("error", "warning", "info", "trace")
_LOOPBACK = "127.0.0.1"

_server: Any = None
"""The rendezvous server of this process, if it is rank 0's: sets of processes that are added later need it too."""


@dataclass(kw_only=True)
class HorovodBackend(Backend):
    """What :class:`~drivetrain_horovod.HorovodConfig` describes.

    Attributes:
        nics: names of network interfaces to use, in order of preference; None to choose by address.
        verbose: how much Horovod logs.
        timeout_s: seconds that ranks that are left may wait for each other.
        operation_timeout_s: seconds that the ranks may take to find each other, and one operation may take.
        preload: see :class:`~drivetrain.Backend`.
        warmup: see :class:`~drivetrain.Backend`.
        survives_losses: see :class:`~drivetrain.Backend`.
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

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Looks at every worker's Horovod and network, and has rank 0 serve Horovod's rendezvous."""
        workers = group.workers
        found = group.run(_look_around)
        for worker, (built, _) in zip(workers, found, strict=True):
            _check_build(worker, built)
        alone = len({worker.node_id for worker in workers}) == 1
        interfaces = [
            self._choose_interface(worker, addresses, alone=alone)
            for worker, (_, addresses) in zip(workers, found, strict=True)
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
            (port,) = group.run(_serve, plan, verbose, ranks=[0])
            shared["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = interfaces[0][1] or workers[0].ip
            shared["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        rendezvous = self._mappings = []
        for slot, (interface, _), gpus in zip(slots, interfaces, _gpus_of_nodes(workers), strict=True):
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
        """Has the other ranks connect again with new processes; rank 0 of Horovod's is one that stayed."""
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
        """Stops the rendezvous that the driver serves."""
        elastic, self._elastic = self._elastic, None
        if elastic is not None:
            elastic.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_elastic": None}  # which is the driver's

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Sets the variables; when the train function has returned without ``hvd.shutdown()``, calls that.

        A peer that still waits for this rank in a collective then gets an error at once. After an exception Horovod
        stays as it is, so that the peers' errors do not come before this one is told.
        """
        level = os.environ.get("HOROVOD_LOG_LEVEL", _LOG_LEVELS[min(self.verbose, len(_LOG_LEVELS) - 1)])
        with _environment({**rendezvous, "HOROVOD_LOG_LEVEL": level}), _threads():
            try:
                yield
            except BaseException as error:
                if context.get_world_size() == 1:  # this may be the driver's own process, which goes on
                    _shut_down()
                if (explanation := explain(error)) is not None:
                    raise PluginError(explanation) from error
                raise
            _shut_down()

    def _choose_interface(
        self, worker: WorkerInfo, addresses: Mapping[str, Sequence[str]], *, alone: bool
    ) -> tuple[str, str]:
        """A network interface of a worker, and its address; empty ones leave the choice to Gloo."""
        if self.nics is not None:
            for name in self.nics:
                if name in addresses:
                    return name, next(iter(addresses[name]), "")
            raise ConfigurationError(
                f"HorovodConfig(nics=...): expected a network interface that every worker has, found none of "
                f"{', '.join(self.nics)} on rank {worker.rank} ({worker.hostname}): there are "
                f"{', '.join(sorted(addresses))}"
            )
        wanted = _LOOPBACK if alone else worker.ip
        return next(((name, wanted) for name, found in addresses.items() if wanted in found), ("", ""))


def _slots(workers: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """What Horovod calls a slot: where each rank is. The cross group of a worker has the same local rank elsewhere."""
    local_sizes = Counter(worker.node_id for worker in workers)
    cross_sizes = Counter(worker.local_rank for worker in workers)
    return [
        {
            "HOSTNAME": worker.node_id,  # a name of the node, which is not resolved
            "RANK": worker.rank,
            "LOCAL_RANK": worker.local_rank,
            "CROSS_RANK": sum(other.local_rank == worker.local_rank for other in workers[: worker.rank]),
            "SIZE": len(workers),
            "LOCAL_SIZE": local_sizes[worker.node_id],
            "CROSS_SIZE": cross_sizes[worker.local_rank],
        }
        for worker in workers
    ]


def _gpus_of_nodes(workers: Sequence[WorkerInfo]) -> list[str]:
    """For each worker, the GPUs of all workers of its node: where each has one, its number is the local rank."""
    of_node: dict[str, dict[str, None]] = {}
    for worker in workers:
        of_node.setdefault(worker.node_id, {}).update(dict.fromkeys(worker.accelerator_ids))
    return [",".join(of_node[worker.node_id]) for worker in workers]


def _check_build(worker: WorkerInfo, built: Mapping[str, str] | None) -> None:
    if built:
        return
    found = "none" if built is None else "one that was built with no framework"
    raise PluginError(
        f"the horovod backend: expected Horovod on every worker, built with the framework that it uses, got {found} on "
        f"rank {worker.rank} ({worker.hostname}). For torch, run there: {BUILD}"
    )


def _look_around() -> tuple[dict[str, str] | None, dict[str, list[str]]]:
    """On a worker: how its Horovod was built, and its network interfaces with their IPv4 addresses."""
    built = find_build()
    if not built:
        return built, {}
    from socket import AF_INET

    import psutil  # which Horovod depends on

    found = {
        name: [entry.address for entry in entries if entry.family == AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return built, found


def _serve(slots: Sequence[tuple[Any, ...]], verbose: int) -> int:
    """On rank 0: starts the rendezvous server, and returns its port, which is free because the server binds it."""
    global _server
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    _server = RendezvousServer(verbose=verbose)
    port: int = _server.start()
    _server.init([SlotInfo(*slot) for slot in slots])
    return port


def _shut_down() -> None:
    for framework in ("torch", "tensorflow", "mxnet"):
        hvd = sys.modules.get(f"horovod.{framework}")
        if hvd is not None and hasattr(hvd, "is_initialized") and hvd.is_initialized():
            hvd.shutdown()


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
    """Gives torch, if it was imported before ``OMP_NUM_THREADS`` was set, as many threads as that says."""
    torch = sys.modules.get("torch")
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if torch is None or not asked.isdecimal() or not int(asked):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(int(asked))
    try:
        yield
    finally:
        torch.set_num_threads(before)
