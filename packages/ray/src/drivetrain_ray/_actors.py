"""The actors of a run: the workers of its present group, and spares that wait to be one's."""

from __future__ import annotations

import contextlib
import functools
import hmac
import re
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import FailureKind
from drivetrain.plugin import receive, receive_bytes
from drivetrain_ray._worker import HELLO_WAIT_S, Devices, RayWorker

if TYPE_CHECKING:
    from drivetrain_ray._cluster import Reservation

__all__ = ["UNREACHABLE", "Actors", "Hello", "kind_of_death", "names_node"]

UNREACHABLE = "cannot be reached any more (its node is gone, or the network to it)"
"""What is said of an actor of which Ray does not know yet whether it has ended."""

_TOKEN_BYTES = 32
_END_WAIT_S = 10.0
_SPARES_AFTER_S = 2.0
"""How long a group trains before its spares are started, which costs the nodes some work."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What an actor says of itself, the first time that it is heard of.

    Attributes:
        facts: what a :class:`~drivetrain.WorkerInfo` wants of it, but for the ranks and the GPUs.
        devices: what Ray has given it.
        connection: the driver's end of its line.
    """

    facts: Mapping[str, Any]
    devices: Devices
    connection: socket.socket


class Actors:
    """Starts actors, and hears of their beginning and their end.

    It outlives the groups of a run, and is closed with the run. A spare belongs to a node and holds no resources: those
    of the group whose worker it becomes are its too.

    Attributes:
        reservation: the share of the cluster that the next group may use again.
        hellos: by index, the actors that have connected.
        dead: by index, what Ray said of the end of those that have ended.
        nodes: those of the last group, in the order of their ranks.
    """

    def __init__(self, host: str) -> None:
        self.reservation: Reservation | None = None
        self.hellos: dict[int, Hello] = {}
        self.dead: dict[int, str] = {}
        self.nodes: Sequence[str] = ()
        self._session: str | None = None
        self._handles: dict[int, Any] = {}
        self._spares: dict[int, str] = {}
        self._stocking: threading.Timer | None = None
        self._ended: deque[tuple[int, str]] = deque()
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    def join_session(self) -> None:
        """Belongs to the cluster that is connected from now on."""
        self._session = _session()

    @property
    def are_of_this_session(self) -> bool:
        """Whether the cluster that is connected is still the same one."""
        return self._session == _session()

    def sources(self) -> Sequence[tuple[socket.socket, Callable[[], None]]]:
        """What a group waits for beside its workers' lines, and what to call when it can be read."""
        return (self._listener, self._accept), (self._wake_read, self._hear_ray)

    def start(self, preload: Sequence[str], **options: Any) -> int:
        """Starts an actor.

        Args:
            preload: modules that it imports before anything else.
            **options: Ray's, such as its resources and where it is placed.

        Returns:
            Its index, the order in which they were asked for.
        """
        index = len(self._handles)
        address = self._listener.getsockname()[:2]
        actor = _actor_class().options(max_restarts=0, **options).remote(index, address, self._token)
        self._handles[index] = actor
        actor.serve.remote(tuple(preload)).future().add_done_callback(lambda ended: self._tell(index, ended))
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
        self._hear_ray()
        for index, place in self._spares.items():
            if place == node and index in self.hellos and index not in self.dead:
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
        while not self.dead.keys() >= set(indices) and (remaining := deadline - time.monotonic()) > 0:
            self._wake_read.settimeout(remaining)
            with contextlib.suppress(TimeoutError):
                self._wake_read.recv(1)
            self._wake_read.setblocking(False)
            self._hear_ray()

    def close(self) -> None:
        """Ends the spares, and gives the reservation back."""
        self.settle()
        self.end([index for index in self._spares if index not in self.dead])
        if self.reservation is not None:
            self.reservation.release()
        for hello in self.hellos.values():
            hello.connection.close()
        for opened in (self._listener, self._wake_read, self._wake_write):
            opened.close()

    def _stock(self, nodes: Sequence[str], preload: Sequence[str]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wanted = Counter(nodes)
        for index, node in list(self._spares.items()):
            if index in self.dead:
                del self._spares[index]
            elif wanted[node] > 0:
                wanted[node] -= 1
            else:
                ray.kill(self._handles[index])
                del self._spares[index]
        for node in wanted.elements():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            self._spares[self.start(preload, num_cpus=0, scheduling_strategy=place)] = node

    def _tell(self, index: int, ended: Any) -> None:
        """On a thread of Ray's: passes on that an actor is gone."""
        self._ended.append((index, _brief_death(ended.exception())))
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def _hear_ray(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while self._ended:
            index, reason = self._ended.popleft()
            self.dead[index] = reason

    def _accept(self) -> None:
        """Takes an actor's connection, if it knows the token."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # taken already, by a wait within the one that has seen it
            return
        connection.settimeout(HELLO_WAIT_S)
        try:
            sent = receive_bytes(connection, _TOKEN_BYTES)
            said = receive(connection) if sent is not None and hmac.compare_digest(sent, self._token) else None
        except OSError:
            said = None
        if said is None:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        index, facts, devices = said
        self.hellos[index] = Hello(facts, devices, connection)


def _session() -> str | None:
    """What tells the cluster that is connected from those before it; None without one."""
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None


@functools.cache
def _actor_class() -> Any:
    """What Ray makes of the class; made once, as Ray never forgets one."""
    import ray

    return ray.remote(RayWorker)


def _brief_death(error: BaseException | None) -> str:
    """What Ray says about the end of an actor, in one line."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    if error is None:
        return "ended"
    if isinstance(error, ActorDiedError) and error.preempted:
        return "ended with its node, which was drained"
    if isinstance(error, ActorUnavailableError):
        return UNREACHABLE
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    detail = re.search(r".*(?:Worker exit detail: |The actor is dead because )(.*)", text)
    return f"died, says Ray: {detail[1] if detail else text}"[:500].rstrip(".")


def kind_of_death(reason: str) -> FailureKind:
    """The class of failure that the end of an actor is, by what Ray says about it."""
    if re.search(r"running low on memory|OOM|out of memory", reason):
        return FailureKind.OUT_OF_MEMORY
    if re.search(r"SIGTERM|preempt|drain", reason):
        return FailureKind.PREEMPTION
    return FailureKind.INFRASTRUCTURE


def names_node(reason: str) -> bool:
    """Whether the end of an actor may be that of its node, by what Ray says about it."""
    return re.search(r"\bnode\b", reason) is not None
