"""Runs workers as Ray actors in a placement group, on a connected cluster or on a local one.

Ray places the actors, and reports when an actor has died. Each worker opens a TCP connection to the driver, and sends
its reports over this connection, as it does over a socket in the local runtime. So a report needs no actor call, and
the driver does not poll.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from drivetrain import WorkerDiedError
from drivetrain.plugin.runtimes import GroupSpec, RemoteGroup, read_stacks
from drivetrain_ray._actors import Actors
from drivetrain_ray._cluster import Reservation, note_unreachable, reserve
from drivetrain_ray._drains import Drains
from drivetrain_ray._references import reduce_reference
from drivetrain_ray._worker import Devices

__all__ = ["RayGroup", "launch_group"]

_NOTICE_WAIT_S = 4.0
"""Maximum wait in seconds for Ray's report of a death. Ray notices the silent loss of a node after 2 s."""
_CLOSE_WAIT_S = 1.0
_EXIT_WAIT_S = 15.0
"""Maximum wait in seconds for processes that run their exit handlers. A process limits this to 10 s itself."""
_STACKS_WAIT_S = 20.0
"""Maximum wait in seconds for the stacks. Each node starts a process that reads them."""


@contextlib.contextmanager
def launch_group(spec: GroupSpec, actors: Actors, reservation: Reservation | None = None) -> Iterator[RayGroup]:
    """Reserve resources and start a group in them.

    All acquired resources are released in reverse order when the context exits, or if the start fails.

    Args:
        spec: the group to start.
        actors: the actors of the run.
        reservation: the reservation to use; None to reserve resources, or to reuse the reservation of the previous
            group.
    """
    actors.attach_session()
    deadline = time.monotonic() + spec.start_timeout_s
    with contextlib.ExitStack() as acquired:
        reserved = acquired.enter_context(_reserved(spec, actors, deadline, reservation))
        group = RayGroup(spec, deadline, actors, reserved)
        acquired.callback(group.close_connections)
        acquired.callback(group.kill_actors)
        group.start()
        yield group


@contextlib.contextmanager
def _reserved(
    spec: GroupSpec, actors: Actors, deadline: float, reservation: Reservation | None
) -> Iterator[Reservation]:
    """Reserve resources. When the context exits, keep them for the next group of the run, or release them."""
    kept, actors.reservation = actors.reservation, None
    reservation = reservation or reserve(spec, deadline, kept)
    reservation.reusable = not spec.elastic
    try:
        yield reservation
    finally:
        if reservation.reusable:
            actors.reservation = reservation
        else:
            reservation.release()


def _actor_settings(spec: GroupSpec) -> object:
    """Return the settings on which actors depend: groups can share actors only if their settings are equal."""
    return spec.num_workers, spec.scaling, spec.output.shown_ranks, dict(spec.environment)


class RayGroup(RemoteGroup):
    """A group of workers that are Ray actors.

    Args:
        spec: the group to start.
        deadline: see :class:`~drivetrain.plugin.runtimes.RemoteGroup`.
        actors: starts the actors, and tracks which ones have died.
        reservation: the resources of the workers.
    """

    def __init__(self, spec: GroupSpec, deadline: float, actors: Actors, reservation: Reservation) -> None:
        super().__init__(spec, deadline)
        self._actors = actors
        self._reservation = reservation
        self._bundle_of: dict[int, int] = {}
        self._spares: set[int] = set()
        self._drains = Drains()
        self._awaited: dict[int, float] = {}  # until when to wait for the reason of a rank's exit

    def start(self) -> None:
        """Start the actors, and wait until they are ready to receive the train function."""
        for source, handle in self._actors.sources():
            self.watch(source, partial(self._on_ready, handle))
        self.watch(self._drains.fileno(), self._report_drains)
        self._start_actors()
        self._await_actors()
        self._assign_ranks()
        self._set_up_workers(range(len(self.workers)))

    def reduce(self, value: Any) -> Any:
        """See :meth:`drivetrain.plugin.Runtime.reduce`."""
        return reduce_reference(value)

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.runtimes.Group.replace`."""
        self.restart_deadline(self.spec.start_timeout_s)
        deaths = self._actors.deaths.by_index
        lost = {index: rank for index, rank in self.rank_of.items() if rank in ranks}
        if missing := lost.keys() - deaths.keys():
            raise WorkerDiedError(f"workers {sorted(missing)}: expected Ray to report their exit, got no report")
        if without_node := [rank for index, rank in lost.items() if deaths[index].lost_node]:
            raise WorkerDiedError(f"the nodes of ranks {without_node} were lost")
        rank_of: dict[int, int] = {}
        for index, rank in lost.items():
            self.forget_rank(rank)
            del self.rank_of[index]
            self._spares.discard(index)
            rank_of[self._start_actor(self._bundle_of.pop(index), {})] = rank
        self._await_actors()
        for index, rank in rank_of.items():
            self.take_over(rank, self._actors.introductions[index])
        self._set_up_workers(ranks)

    def _await_actors(self) -> None:
        while missing := sorted(set(self._bundle_of) - set(self._actors.introductions)):
            for index in missing:
                if (death := self._actors.deaths.by_index.get(index)) is not None:
                    raise WorkerDiedError(f"worker {index} did not start: it {death.reason}")
            self.wait(f"workers {missing} to start on the Ray cluster", ())

    def training_started(self) -> None:
        """Watch for nodes that are being drained, and start spares for the next group of the run."""
        self._drains.start()
        if count := self.spec.scaling.spare_workers:
            nodes = [self.workers[number % len(self.workers)].node_id for number in range(count)]
            self._actors.schedule_spares(nodes, (*self.spec.preload, *self.spec.warmup), self.spec.environment)

    def park(self) -> bool:
        """See :meth:`drivetrain.plugin.runtimes.Group.park`."""
        self._drains.stop()
        return super().park()

    def stop_requested(self) -> None:
        """Release the resources after this group, so that the next group can reserve different ones."""
        self._reservation.reusable = False

    def reuse(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.runtimes.Group.reuse`."""
        same = _actor_settings(spec) == _actor_settings(self.spec)
        avoided = any(worker.node_id in spec.avoided for worker in self.workers)
        if not same or avoided or not self._actors.has_current_session:
            return False
        spec.interrupts.replace_handlers_of("ray")
        return super().reuse(spec)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.runtimes.Group.stacks`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        read = ray.remote(read_stacks)
        replies = []
        for node, targets in self.stack_targets(ranks).items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            replies.append(read.options(num_cpus=0, scheduling_strategy=place).remote(targets))
        stacks: dict[int, str] = {}
        arrived, _ = ray.wait(replies, num_returns=len(replies), timeout=_STACKS_WAIT_S)
        for reply in arrived:
            with contextlib.suppress(ray.exceptions.RayError):  # the node was lost
                stacks.update(ray.get(reply))
        return stacks

    def connection_closed(self, rank: int) -> None:
        """Wait for Ray's report of the cause of death. It arrives immediately unless the node was lost.

        The wait may call this method again for other ranks. Only the outermost call waits: for all ranks together, and
        with a stack whose depth does not depend on their number.
        """
        is_outermost = not self._awaited
        self._awaited[rank] = time.monotonic() + _NOTICE_WAIT_S
        if not is_outermost:
            return
        try:
            while self._awaited:
                now = time.monotonic()
                for lost, deadline in list(self._awaited.items()):
                    if deadline <= now and not self.has_exited(lost):
                        self._reservation.reusable = False
                        self.note_exit(lost, None, "closed its connection to the driver")
                    if self.has_exited(lost):
                        del self._awaited[lost]
                if self._awaited:
                    self.handle_ready(min(self._awaited.values()) - now)
        finally:
            self._awaited.clear()

    def _start_actors(self) -> None:
        """Provide a process for each bundle: a spare on the bundle's node, or else a new actor."""
        nodes = self._reservation.nodes() if self.spec.scaling.spare_workers else {}
        first = self._reservation.first_bundle
        for bundle in range(first, first + self.spec.num_workers):
            self._start_actor(bundle, nodes)

    def _start_actor(self, bundle: int, nodes: Mapping[int, str]) -> int:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reservation = self._reservation
        index = None
        if bundle in nodes and reservation.accepts_spare(bundle):
            index = self._actors.take_spare(nodes[bundle])
        if index is not None:
            self._spares.add(index)
        else:
            resources = dict(reservation.group.bundle_specs[bundle])
            index = self._actors.start(
                self.spec.preload,
                self.spec.environment,
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    reservation.group, placement_group_bundle_index=bundle
                ),
            )
        self._bundle_of[index] = bundle
        return index

    def _on_ready(self, handle: Callable[[], None]) -> None:
        """Handle new connections and exits of actors, and report which workers of this group have exited."""
        handle()
        self._report_deaths()

    def _report_deaths(self) -> None:
        for index in self.rank_of.keys() & self._actors.deaths.by_index.keys():
            rank, death = self.rank_of[index], self._actors.deaths.by_index[index]
            if death.lost_node:
                self._reservation.reusable = False
            if not death.is_certain:
                note_unreachable(self.workers[rank].node_id)
            self.note_exit(rank, None, death.reason, death.kind)

    def _report_drains(self) -> None:
        nodes = self._drains.take()
        if ranks := [worker.rank for worker in self.workers if worker.node_id in nodes]:
            deadlines = [deadline for rank in ranks if (deadline := nodes[self.workers[rank].node_id]) is not None]
            shown = ", ".join(map(str, ranks))
            self.note_draining(ranks, min(deadlines, default=None), f"Ray drains the node of ranks {shown}")

    def _assign_ranks(self) -> None:
        import ray

        processes = [
            self._actors.introductions[index] for index in sorted(self._bundle_of, key=self._bundle_of.__getitem__)
        ]
        for process in processes:
            if process.index not in self._spares:
                self._reservation.devices[self._bundle_of[process.index]] = process.details
        devices = {process.index: self._devices(process.index) for process in processes}
        self._actors.nodes = self.assign_ranks(
            processes,
            {index: each.gpus for index, each in devices.items()},
            first_node=ray.get_runtime_context().get_node_id(),
            previous_nodes=self._actors.nodes,
            other_accelerators={index: each.others for index, each in devices.items()},
        )
        self._report_deaths()

    def _set_up_workers(self, ranks: Sequence[int]) -> None:
        spares = {index: rank for index, rank in self.rank_of.items() if rank in ranks and index in self._spares}
        self.set_up(ranks, {rank: self._devices(index).environment for index, rank in spares.items()})

    def _devices(self, index: int) -> Devices:
        """Return the devices of a worker. Ray assigns none to a spare, so a spare uses the devices of its bundle."""
        return self._reservation.devices.get(self._bundle_of[index], Devices((), {}, {}))

    def kill_actors(self) -> None:
        """Kill all workers. Wait for Ray's confirmation, and then for the exit of the processes shortly afterwards."""
        self.ignore_interrupts()
        self.forget(self._drains.fileno())
        self._drains.close()
        self._actors.cancel_spares()
        if self.let_exit():
            self.wait_for_closed_connections(_EXIT_WAIT_S)
        self._actors.kill(self._bundle_of)
        self.wait_for_closed_connections(_CLOSE_WAIT_S)
