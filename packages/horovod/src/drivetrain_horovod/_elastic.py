"""Horovod's rendezvous for workers that come and go, served by the driver, which outlives them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from drivetrain import PluginError
from drivetrain_horovod._built import BUILD

__all__ = ["ElasticRendezvous"]

T = TypeVar("T")

Place = tuple[str, int]
"""What names a worker to Horovod, whatever its rank: host name and local rank."""


class _Server:
    """Horovod's rendezvous server, on a thread of the driver.

    Args:
        near: an address that is reached over the interface to serve on.
        verbose: how much the server logs.
        coordinator: receives the calls of Horovod's handler.
        on_delete: called with the path of each DELETE request, on the request's thread.
    """

    def __init__(self, near: str, verbose: int, coordinator: object, on_delete: Callable[[str], None]) -> None:
        from horovod.runner.elastic.rendezvous import create_rendezvous_handler
        from horovod.runner.http.http_server import RendezvousHTTPServer

        base: Any = create_rendezvous_handler(coordinator)

        class Handler(base):  # type: ignore[misc]
            def do_DELETE(self) -> None:
                on_delete(self.path)
                super().do_DELETE()

        self._server = RendezvousHTTPServer((_address_towards(near), 0), Handler, verbose)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # of a worker that was lost
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="Horovod's rendezvous")
        self.address: str
        self.port: int
        self.address, self.port = self._server.server_address[:2]

    def start(self, slots: Sequence[Any]) -> None:
        """Starts to serve a plan of who is where."""
        self.plan(slots)
        self._thread.start()

    def plan(self, slots: Sequence[Any]) -> None:
        """Replaces the plan."""
        self._server.init(list(slots))

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass(frozen=True, slots=True)
class _Rejoin:
    """A request to give new workers the places of lost ones.

    Attributes:
        lost: the places.
        resolve: called when all workers have found each other.
    """

    lost: frozenset[Place] = frozenset()
    resolve: Callable[[], None] = lambda: None


class ElasticRendezvous:
    """Makes workers whose collective failed wait for all others, and then find each other again.

    Args:
        slots: who is where at first, as Horovod's ``SlotInfo`` has it.
        near: an address that is reached over the interface to serve on.
        timeout_s: seconds that a worker may wait for the others.
        verbose: how much Horovod's server logs.

    Attributes:
        server: Horovod's server; its address and port are what workers connect to.

    Raises:
        PluginError: there is no Horovod in the driver's environment.
    """

    def __init__(self, slots: Sequence[tuple[Any, ...]], near: str, timeout_s: float, verbose: int) -> None:
        try:
            from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
        except ModuleNotFoundError as error:
            raise PluginError(
                f"HorovodConfig(elastic=True): expected Horovod in the driver's environment too, got none. Run {BUILD}"
            ) from error

        self._timeout_s = timeout_s
        self._nowhere = INVALID_SLOT_INFO
        self._changed = threading.Condition()
        self._slots = {(slot.hostname, slot.local_rank): slot for slot in (SlotInfo(*values) for values in slots)}
        self._waiting: set[Place] = set()
        self._pending = _Rejoin()
        self._closed = False
        self._connected: set[str] = set()
        self.server = _Server(near, verbose, self, self._note_connected)
        self.server.start(list(self._slots.values()))

    def rejoin(self, lost: Sequence[Place], describe: Callable[[Sequence[Any]], T]) -> Future[T]:
        """Gives new workers the places of lost ones, once all others wait.

        Args:
            lost: their places.
            describe: makes the result of the slots of the new workers.

        Returns:
            What is done then; cancelled if workers were still connecting, which cannot notice that one is lost.
        """
        future: Future[T] = Future()
        with self._changed:
            if len(self._connected) < len(self._slots):
                future.cancel()
                return future
            self._pending = _Rejoin(
                frozenset(lost), lambda: future.set_result(describe([self._slots[place] for place in lost]))
            )
            self._waiting -= self._pending.lost
            self._begin_if_complete()
        return future

    def close(self) -> None:
        """Stops the server; workers that still wait get no place."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.server.close()

    def record_ready(self, host: str, local_rank: int) -> None:
        """For Horovod's handler, on a thread for each request: a worker waits for a rank."""
        with self._changed:
            self._waiting.add((host, local_rank))
            self._begin_if_complete()
            self._changed.wait_for(lambda: self._closed or (host, local_rank) not in self._waiting, self._timeout_s)

    def get_slot_info(self, host: str, local_rank: int) -> Any:
        """For Horovod's handler: the worker's rank, or none if the others have not come."""
        with self._changed:
            place = (host, local_rank)
            return self._nowhere if place in self._waiting else self._slots[place]

    def register_worker_server(self, host: str, local_rank: int, addresses: object, key: object) -> None:
        """For Horovod's handler: where a worker could be told of hosts that have come."""

    def _note_connected(self, path: str) -> None:
        """A worker is through with something; the last of a start, but for process sets, are the cross contexts."""
        if path.startswith("/cross_") and "process_set" not in path:
            with self._changed:
                self._connected.add(path)

    def _begin_if_complete(self) -> None:
        lost = self._pending.lost
        if self._waiting != self._slots.keys() - lost:
            return
        # Rank 0 hands its state to the others, so it has to be one that stayed.
        order = sorted(self._slots, key=lambda place: (place in lost, self._slots[place].rank))
        ranks = {place: self._slots[place].rank for place in order}
        if order and ranks[order[0]] != 0:
            first = next(place for place, rank in ranks.items() if rank == 0)
            ranks[first], ranks[order[0]] = ranks[order[0]], 0
        self._slots = {place: replace(slot, rank=ranks[place]) for place, slot in self._slots.items()}
        self.server.plan(list(self._slots.values()))
        self._connected.clear()
        self._waiting.clear()
        pending, self._pending = self._pending, _Rejoin()
        pending.resolve()
        self._changed.notify_all()


def _address_towards(address: str) -> str:
    """This machine's own address on the way to another, to which nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
