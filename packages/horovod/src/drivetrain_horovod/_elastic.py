"""Horovod's rendezvous for workers that come and go, served by the driver, which outlives them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from drivetrain import PluginError
from drivetrain_horovod._built import BUILD

__all__ = ["ElasticRendezvous"]

T = TypeVar("T")

Place = tuple[str, int]
"""What names a worker to Horovod, whatever its rank: host name and local rank."""


class ElasticRendezvous:
    """Has workers whose collective failed wait until all of them do, and then find each other anew.

    Args:
        slots: who is where at first, as Horovod's ``SlotInfo`` has it.
        near: an address that is reached over the interface to serve on.
        timeout_s: seconds that a worker may wait for the others.
        verbose: how much Horovod's server logs.

    Raises:
        PluginError: there is no Horovod in the driver's environment.
    """

    def __init__(self, slots: Sequence[tuple[Any, ...]], near: str, timeout_s: float, verbose: int) -> None:
        try:
            from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
            from horovod.runner.elastic.rendezvous import create_rendezvous_handler
            from horovod.runner.http.http_server import RendezvousHTTPServer
        except ModuleNotFoundError as error:
            raise PluginError(
                f"HorovodConfig(elastic=True) wants Horovod in the driver's environment too, found none: run {BUILD}"
            ) from error

        self._timeout_s = timeout_s
        self._nowhere = INVALID_SLOT_INFO
        self._changed = threading.Condition()
        self._slots = {(slot.hostname, slot.local_rank): slot for slot in (SlotInfo(*values) for values in slots)}
        self._waiting: set[Place] = set()
        self._lost: set[Place] = set()
        self._resolve: Callable[[], None] = lambda: None
        self._closed = False
        self._connected: set[str] = set()
        told: Any = create_rendezvous_handler(self)
        note_connected = self._note_connected

        class Handler(told):  # type: ignore[misc]
            def do_DELETE(self) -> None:
                note_connected(self.path)
                super().do_DELETE()

        self._server = RendezvousHTTPServer((_address_towards(near), 0), Handler, verbose)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # of a worker that is gone
        self._server.init(list(self._slots.values()))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="Horovod's rendezvous")
        self._thread.start()
        self.address, self.port = self._server.server_address[:2]

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
            self._lost = set(lost)
            self._waiting -= self._lost
            self._resolve = lambda: future.set_result(describe([self._slots[place] for place in lost]))
            self._begin_if_complete()
        return future

    def close(self) -> None:
        """Stops the server; who still waits is told that there is no place."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

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
        if self._waiting != self._slots.keys() - self._lost:
            return
        # Rank 0 hands its state to the others, so it has to be one that stayed.
        order = sorted(self._slots, key=lambda place: (place in self._lost, self._slots[place].rank))
        ranks = {place: self._slots[place].rank for place in order}
        if order and ranks[order[0]] != 0:
            first = next(place for place, rank in ranks.items() if rank == 0)
            ranks[first], ranks[order[0]] = ranks[order[0]], 0
        self._slots = {place: replace(slot, rank=ranks[place]) for place, slot in self._slots.items()}
        self._server.init(list(self._slots.values()))
        self._connected.clear()
        self._waiting.clear()
        self._lost.clear()
        self._resolve()
        self._resolve = lambda: None
        self._changed.notify_all()


def _address_towards(address: str) -> str:
    """This machine's own address on the way to another, to which nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
