"""tally, which sums numbers over all workers, and its plugins for drivetrain."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from drivetrain import DataParallelTrainer, TrainContext
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.backends import WorkerGroup
from drivetrain.plugin.trainers import checked_config

_listener: Listener | None = None  # on rank 0
_connections: list[
    Connection
] = []  # on rank 0, to all other ranks; on the others, to rank 0


def listen(host: str) -> int:
    """Open a port for the other ranks and return its number. Called on rank 0."""
    global _listener
    _listener = Listener((host, 0))
    port: int = _listener.address[1]
    return port


def connect(host: str, port: int, rank: int, size: int) -> None:
    """Connect rank 0 with each of the other ranks. Called on every rank."""
    if rank == 0:
        assert _listener is not None
        _connections.extend(_listener.accept() for _ in range(size - 1))
    else:
        _connections.append(Client((host, port)))


def disconnect() -> None:
    """Close all connections. Called on every rank."""
    global _listener
    while _connections:
        _connections.pop().close()
    if _listener is not None:
        _listener.close()
        _listener = None


def all_sum(value: float) -> float:
    """Return the sum of the values of all ranks. Every rank has to call it."""
    if _listener is None:
        _connections[0].send(value)
        received: float = _connections[0].recv()
        return received
    total: float = sum((connection.recv() for connection in _connections), start=value)
    for connection in _connections:
        connection.send(total)
    return total


@dataclass(frozen=True)
class TallyBackend(Backend):
    """Connect the workers."""

    host: str | None
    name = "tally"

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Open a port on rank 0, and return its address for every rank."""
        host = self.host or group.workers[0].ip
        (port,) = group.run(listen, host, ranks=[0])
        return [{"host": host, "port": str(port)} for _ in group.workers]

    @contextlib.contextmanager
    def session(
        self,
        context: TrainContext,
        rendezvous: Mapping[str, str],
    ) -> Iterator[None]:
        """Connect this worker while the train function runs."""
        connect(
            *(rendezvous["host"], int(rendezvous["port"])),
            *(context.get_world_rank(), context.get_world_size()),
        )
        try:
            yield
        except BaseException:
            if context.get_world_size() == 1:  # may be the process of the driver
                disconnect()
            raise  # with several ranks, disconnecting would make the others fail first
        disconnect()


@dataclass(frozen=True, kw_only=True)
class TallyConfig(BackendConfig):
    """The configuration of the tally backend.

    Attributes:
        host: the address that rank 0 listens on; None for the address of its node.
    """

    host: str | None = None

    def create(self) -> Backend:
        """Return the backend."""
        return TallyBackend(self.host)


class TallyTrainer(DataParallelTrainer):
    """Run a train function on workers that tally connects."""

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        tally_config: TallyConfig | None = None,
        **arguments: Any,
    ) -> None:
        where = "TallyTrainer(tally_config=...)"
        config = checked_config(tally_config, TallyConfig, where)
        super().__init__(train_loop_per_worker, backend_config=config, **arguments)
