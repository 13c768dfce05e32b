"""tally adds numbers up over all workers; and its backend for drivetrain."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener

from drivetrain import Backend, BackendConfig, TrainContext, WorkerGroup

_listener: Listener | None = None  # on rank 0
_links: list[Connection] = []  # on rank 0 to all other ranks, on the others to rank 0


def listen(host: str) -> int:
    """On rank 0: opens a port for the other ranks and returns its number."""
    global _listener
    _listener = Listener((host, 0))
    return _listener.address[1]


def connect(host: str, port: int, rank: int, size: int) -> None:
    """On every rank: opens the links, rank 0 to each of the others."""
    if rank == 0:
        _links.extend(_listener.accept() for _ in range(size - 1))
    else:
        _links.append(Client((host, port)))


def disconnect() -> None:
    """On every rank: closes what is open."""
    global _listener
    while _links:
        _links.pop().close()
    if _listener is not None:
        _listener.close()
        _listener = None


def all_sum(value: float) -> float:
    """The sum of every rank's value; every rank has to call it."""
    if _listener is None:
        _links[0].send(value)
        return _links[0].recv()
    total = sum((link.recv() for link in _links), start=value)
    for link in _links:
        link.send(total)
    return total


@dataclass(frozen=True)
class TallyBackend(Backend):
    """Connects the workers."""

    host: str | None
    name = "tally"

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Has rank 0 open a port, and tells every rank where that is."""
        host = self.host or group.workers[0].ip
        (port,) = group.run(listen, host, ranks=[0])
        return [{"host": host, "port": str(port)} for _ in group.workers]

    @contextlib.contextmanager
    def session(
        self,
        context: TrainContext,
        rendezvous: Mapping[str, str],
    ) -> Iterator[None]:
        """Connects this worker for the time of the train function."""
        connect(
            *(rendezvous["host"], int(rendezvous["port"])),
            *(context.get_world_rank(), context.get_world_size()),
        )
        yield
        disconnect()  # not after an exception: the other ranks would fail of it first


@dataclass(frozen=True, kw_only=True)
class TallyConfig(BackendConfig):
    """How workers find each other.

    Attributes:
        host: the address that rank 0 listens on; None takes its node's.
    """

    host: str | None = None

    def create(self) -> Backend:
        """The backend."""
        return TallyBackend(self.host)
