"""The actors of a run: the workers of its current group, and spares for later groups."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.plugin.runtimes import Introduction, WorkerListener
from drivetrain_ray._deaths import Deaths
from drivetrain_ray._worker import RayWorker

if TYPE_CHECKING:
    from drivetrain_ray._cluster import Reservation

__all__ = ["Actors"]

_KILL_WAIT_S = 10.0
_SPARES_AFTER_S = 2.0
"""Time in seconds between the start of training and the start of spares, because starting them loads the nodes."""


class Actors:
    """Starts and kills actors.

    All groups of a run use the same instance, which is closed at the end of the run. A spare is an actor that is
    started on a node in advance. It reserves no resources: when it becomes a worker of a group, it uses the resources
    of this group.

    Args:
        host: the IP address of the driver.
        expected: the maximum number of actors that connect at the same time.
        ports: see :class:`~drivetrain.plugin.runtimes.GroupSpec`.

    Attributes:
        reservation: the reservation that the next group may reuse; None if there is none.
        introductions: the first messages of the connected actors, by the index of the actor.
        deaths: collects the deaths of the actors.
        nodes: the nodes of the previous group, in the order of their ranks.
    """

    def __init__(self, host: str, expected: int, ports: range | None = None) -> None:
        self.reservation: Reservation | None = None
        self.introductions: dict[int, Introduction] = {}
        self.deaths = Deaths()
        self.nodes: Sequence[str] = ()
        self._listener = WorkerListener(host, expected=expected, ports=ports)
        self._session: str | None = None
        self._handles: dict[int, Any] = {}
        self._spares: dict[int, str] = {}
        self._spares_timer: threading.Timer | None = None

    def attach_session(self) -> None:
        """Remember the currently connected cluster as the cluster of the actors."""
        self._session = _session()

    @property
    def has_current_session(self) -> bool:
        """True if the cluster of the actors is still connected."""
        return self._session == _session()

    def sources(self) -> Sequence[tuple[int, Callable[[], None]]]:
        """Return the descriptors that a group waits for, each with a function to call when it is readable."""
        return (self._listener.fileno(), self._accept), (self.deaths.fileno(), self.deaths.collect)

    def start(self, preload: Sequence[str], environment: Mapping[str, str], **options: Any) -> int:
        """Start an actor.

        Args:
            preload: modules that the actor imports before anything else.
            environment: environment variables that the actor sets before it imports them.
            **options: Ray's options for the actor, such as resources and placement.

        Returns:
            The index of the actor: the number of actors that were started before.
        """
        index = len(self._handles)
        actor = _actor_class().options(max_restarts=0, **options).remote(index, self._listener.address)
        self._handles[index] = actor
        serving = actor.serve.remote(tuple(preload), dict(environment))
        serving.future().add_done_callback(lambda call: self.deaths.report(index, call))
        return index

    def schedule_spares(self, nodes: Sequence[str], preload: Sequence[str], environment: Mapping[str, str]) -> None:
        """Schedule the start of missing spares, and the termination of superfluous ones, on a timer's thread.

        Args:
            nodes: the node of each spare that has to exist afterwards.
            preload: see :meth:`start`.
            environment: see :meth:`start`.
        """
        self.cancel_spares()
        self._spares_timer = threading.Timer(_SPARES_AFTER_S, self._adjust_spares, (nodes, preload, environment))
        self._spares_timer.daemon = True
        self._spares_timer.start()

    def cancel_spares(self) -> None:
        """Cancel the scheduled start of spares, or wait for its end if it is in progress."""
        if self._spares_timer is not None:
            self._spares_timer.cancel()
            self._spares_timer.join()
            self._spares_timer = None

    def take_spare(self, node: str) -> int | None:
        """Remove a spare on a node from the spares and return its index; None if the node has no connected spare."""
        self.deaths.collect()
        for index, place in self._spares.items():
            if place == node and index in self.introductions and index not in self.deaths.by_index:
                del self._spares[index]
                return index
        return None

    def kill(self, indices: Collection[int]) -> None:
        """Kill actors, and wait until Ray reports their deaths, for a limited time."""
        import ray

        if not self.has_current_session:  # the actors were lost with their cluster
            return
        for index in indices:
            ray.kill(self._handles[index])
        deadline = time.monotonic() + _KILL_WAIT_S
        while not self.deaths.by_index.keys() >= set(indices) and (remaining := deadline - time.monotonic()) > 0:
            self.deaths.wait(remaining)

    def close(self) -> None:
        """Kill the spares, release the reservation, and close all connections."""
        self.cancel_spares()
        self.kill([index for index in self._spares if index not in self.deaths.by_index])
        if self.reservation is not None:
            self.reservation.release()
        for introduction in self.introductions.values():
            introduction.connection.close()
        self._listener.close()
        self.deaths.close()

    def _adjust_spares(self, nodes: Sequence[str], preload: Sequence[str], environment: Mapping[str, str]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        missing = Counter(nodes)
        for index, node in list(self._spares.items()):
            if index in self.deaths.by_index:
                del self._spares[index]
            elif missing[node] > 0:
                missing[node] -= 1
            else:
                ray.kill(self._handles[index])
                del self._spares[index]
        for node in missing.elements():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            self._spares[self.start(preload, environment, num_cpus=0, scheduling_strategy=place)] = node

    def _accept(self) -> None:
        introduction = self._listener.accept()
        if introduction is not None:
            self.introductions[introduction.index] = introduction


def _session() -> str | None:
    """Return the address of the connected cluster, which no earlier cluster had; None without a connection."""
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None


@functools.cache
def _actor_class() -> Any:
    """Return Ray's actor class. It is created only once, because Ray never frees an actor class."""
    import ray

    return ray.remote(RayWorker)
