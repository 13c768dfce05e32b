"""The actors of a run: the workers of its present group, and spares that wait to be one's."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.plugin import Introduction, WorkerListener
from drivetrain_ray._deaths import Deaths
from drivetrain_ray._worker import RayWorker

if TYPE_CHECKING:
    from drivetrain_ray._cluster import Reservation

__all__ = ["Actors"]

_END_WAIT_S = 10.0
_SPARES_AFTER_S = 2.0
"""How long a group trains before its spares are started, which costs the nodes some work."""


class Actors:
    """Starts and ends actors.

    It outlives the groups of a run, and is closed with the run. A spare belongs to a node and holds no resources of its
    own: it uses those of the group whose worker it becomes.

    Args:
        host: the IP address of the driver.
        expected: how many actors may connect at the same time.

    Attributes:
        reservation: the share of the cluster that the next group may use again.
        introductions: the actors that have connected, by index.
        deaths: the actors that have ended.
        nodes: the nodes of the last group, in the order of their ranks.
    """

    def __init__(self, host: str, expected: int) -> None:
        self.reservation: Reservation | None = None
        self.introductions: dict[int, Introduction] = {}
        self.deaths = Deaths()
        self.nodes: Sequence[str] = ()
        self._listener = WorkerListener(host, expected=expected)
        self._session: str | None = None
        self._handles: dict[int, Any] = {}
        self._spares: dict[int, str] = {}
        self._stocking: threading.Timer | None = None

    def join_session(self) -> None:
        """Belongs to the cluster that is connected from now on."""
        self._session = _session()

    @property
    def are_of_this_session(self) -> bool:
        """Whether the cluster that is connected is still the same one."""
        return self._session == _session()

    def sources(self) -> Sequence[tuple[int, Callable[[], None]]]:
        """The descriptors that a group waits for, each with a function to call when it can be read."""
        return (self._listener.fileno(), self._accept), (self.deaths.fileno(), self.deaths.collect)

    def start(self, preload: Sequence[str], **options: Any) -> int:
        """Starts an actor.

        Args:
            preload: modules that it imports before anything else.
            **options: Ray's, such as its resources and where it is placed.

        Returns:
            Its index, the order in which they were asked for.
        """
        index = len(self._handles)
        actor = _actor_class().options(max_restarts=0, **options).remote(index, self._listener.address)
        self._handles[index] = actor
        actor.serve.remote(tuple(preload)).future().add_done_callback(lambda ended: self.deaths.report(index, ended))
        return index

    def stock(self, nodes: Sequence[str], preload: Sequence[str]) -> None:
        """Has one spare for each entry of a list of nodes, in a while, and none beside."""
        self._stocking = threading.Timer(_SPARES_AFTER_S, self._stock, (nodes, preload))
        self._stocking.daemon = True
        self._stocking.start()

    def settle(self) -> None:
        """Has :meth:`stock` be through with what it has begun, and begin no more."""
        if self._stocking is not None:
            self._stocking.cancel()
            self._stocking.join()
            self._stocking = None

    def take_spare(self, node: str) -> int | None:
        """The index of a spare on a node, which is none any more, or None."""
        self.deaths.collect()
        for index, place in self._spares.items():
            if place == node and index in self.introductions and index not in self.deaths.by_index:
                del self._spares[index]
                return index
        return None

    def end(self, indices: Collection[int]) -> None:
        """Ends actors, and waits until Ray has seen to it."""
        import ray

        if not self.are_of_this_session:  # whose end was theirs
            return
        for index in indices:
            ray.kill(self._handles[index])
        deadline = time.monotonic() + _END_WAIT_S
        while not self.deaths.by_index.keys() >= set(indices) and (remaining := deadline - time.monotonic()) > 0:
            self.deaths.wait(remaining)

    def close(self) -> None:
        """Ends the spares, and gives the reservation back."""
        self.settle()
        self.end([index for index in self._spares if index not in self.deaths.by_index])
        if self.reservation is not None:
            self.reservation.release()
        for introduction in self.introductions.values():
            introduction.connection.close()
        self._listener.close()
        self.deaths.close()

    def _stock(self, nodes: Sequence[str], preload: Sequence[str]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wanted = Counter(nodes)
        for index, node in list(self._spares.items()):
            if index in self.deaths.by_index:
                del self._spares[index]
            elif wanted[node] > 0:
                wanted[node] -= 1
            else:
                ray.kill(self._handles[index])
                del self._spares[index]
        for node in wanted.elements():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            self._spares[self.start(preload, num_cpus=0, scheduling_strategy=place)] = node

    def _accept(self) -> None:
        introduction = self._listener.accept()
        if introduction is not None:
            self.introductions[introduction.index] = introduction


def _session() -> str | None:
    """What tells the cluster that is connected from those before it; None without one."""
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None


@functools.cache
def _actor_class() -> Any:
    """What Ray makes of the class; made once, as Ray never forgets one."""
    import ray

    return ray.remote(RayWorker)
