"""Horovod's rendezvous for workers that can be replaced. The server runs in the driver, which outlives the workers."""

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
"""A host name and a local rank. They identify a worker for Horovod, even if the worker's rank changes."""


@dataclass(frozen=True, slots=True)
class _Rejoin:
    """A request to give the places of lost workers to new workers.

    Attributes:
        lost: the places of the lost workers.
        resolve: called when all surviving workers wait for the new ranks and these have been set.
    """

    lost: frozenset[Place] = frozenset()
    resolve: Callable[[], None] = lambda: None


class ElasticRendezvous:
    """Makes workers wait after a failed collective operation until all workers are ready, and then reconnects them.

    Args:
        slots: the initial slots, each with the fields of Horovod's ``SlotInfo``.
        worker_address: the address of a worker. The server listens on the network interface that leads to this address.
        timeout_s: time limit in seconds for a worker to wait for the others.
        verbose: the level of the log of Horovod's server.

    Attributes:
        server: Horovod's server. Workers connect to its address and port.

    Raises:
        PluginError: Horovod is not installed in the driver's environment.
    """

    def __init__(self, slots: Sequence[tuple[Any, ...]], worker_address: str, timeout_s: float, verbose: int) -> None:
        try:
            from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
            from horovod.runner.elastic.rendezvous import create_rendezvous_handler

            from drivetrain_horovod._rendezvous import Server
        except ModuleNotFoundError as error:
            raise PluginError(
                "HorovodConfig(elastic=True) requires Horovod in the driver's environment too, which is not installed. "
                f"Run: {BUILD}"
            ) from error

        self._timeout_s = timeout_s
        self._invalid_slot = INVALID_SLOT_INFO
        self._changed = threading.Condition()
        self._slots = {(slot.hostname, slot.local_rank): slot for slot in (SlotInfo(*values) for values in slots)}
        self._waiting: set[Place] = set()
        self._pending = _Rejoin()
        self._closed = False
        self._connected: set[str] = set()
        on_delete = self._on_delete
        base: Any = create_rendezvous_handler(self)

        class Handler(base):  # type: ignore[misc]
            def do_DELETE(self) -> None:
                on_delete(self.path)
                super().do_DELETE()

        self.server = Server(_address_towards(worker_address), Handler, list(self._slots.values()), verbose)

    def rejoin(self, lost: Sequence[Place], describe: Callable[[Sequence[Any]], T]) -> Future[T]:
        """Give the places of lost workers to new workers, once all other workers are waiting.

        Args:
            lost: the places of the lost workers.
            describe: called with the slots of the new workers. It returns the result of the future.

        Returns:
            A future. It is cancelled if workers are still connecting, because a worker that is connecting cannot notice
            the loss of another worker.
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
        """Stop the server. Workers that are still waiting do not get a rank."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.server.close()

    def record_ready(self, host: str, local_rank: int) -> None:
        """Wait until the given worker has a rank, but not longer than the time limit.

        Called by Horovod's handler, on a separate thread for each request.
        """
        with self._changed:
            self._waiting.add((host, local_rank))
            self._begin_if_complete()
            self._changed.wait_for(lambda: self._closed or (host, local_rank) not in self._waiting, self._timeout_s)

    def get_slot_info(self, host: str, local_rank: int) -> Any:
        """Return the slot of the given worker, or an invalid slot if the worker is still waiting for other workers.

        Called by Horovod's handler.
        """
        with self._changed:
            place = (host, local_rank)
            return self._invalid_slot if place in self._waiting else self._slots[place]

    def register_worker_server(self, host: str, local_rank: int, addresses: object, key: object) -> None:
        """Ignore the address at which the worker could be notified of new hosts. Called by Horovod's handler."""

    def _on_delete(self, path: str) -> None:
        """Note that a worker has connected, if the path of a DELETE request shows it.

        A worker sends a DELETE request whenever it has connected one of its contexts. The contexts of process sets do
        not count; of the others, the cross context is the last.
        """
        if path.startswith("/cross_") and "process_set" not in path:
            with self._changed:
                self._connected.add(path)

    def _begin_if_complete(self) -> None:
        lost = self._pending.lost
        if self._waiting != self._slots.keys() - lost:
            return
        # Rank 0 sends its state to the other ranks, so it must be a surviving worker.
        order = sorted(self._slots, key=lambda place: (place in lost, self._slots[place].rank))
        ranks = {place: self._slots[place].rank for place in order}
        if order and ranks[order[0]] != 0:
            first = next(place for place, rank in ranks.items() if rank == 0)
            ranks[first], ranks[order[0]] = ranks[order[0]], 0
        self._slots = {place: replace(slot, rank=ranks[place]) for place, slot in self._slots.items()}
        self.server.set_slots(list(self._slots.values()))
        self._connected.clear()
        self._waiting.clear()
        pending, self._pending = self._pending, _Rejoin()
        pending.resolve()
        self._changed.notify_all()


def _address_towards(address: str) -> str:
    """Return the address that this machine uses to reach the given address. No data is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
