"""Workers as Ray actors in a placement group, on a cluster that is connected or on one started here.

Ray places the actors, and tells when one is gone. What workers report comes over a TCP connection that each of them
opens to the driver, as over the local runtime's sockets: a report costs no actor call, and nothing polls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from drivetrain import WorkerDiedError
from drivetrain.plugin import GroupSpec, RemoteGroup, read_stacks
from drivetrain_ray._actors import Actors
from drivetrain_ray._cluster import Reservation, note_unreachable, reserve
from drivetrain_ray._references import reduce_reference
from drivetrain_ray._worker import Devices

__all__ = ["RayGroup", "launch_group"]

_NOTICE_WAIT_S = 4.0
"""Ray notices after 2 s that a node was lost without a message."""
_CLOSE_WAIT_S = 1.0
_STACKS_WAIT_S = 10.0


@contextlib.contextmanager
def launch_group(spec: GroupSpec, actors: Actors, given: Reservation | None = None) -> Iterator[RayGroup]:
    """Reserves resources and starts a group in them.

    Whatever was acquired is released in reverse order on leaving the context, and if the start fails.

    Args:
        spec: the group to start.
        actors: the actors of the run.
        given: the resources to use; None reserves some, or uses those of the last group again.
    """
    actors.join_session()
    deadline = time.monotonic() + spec.start_timeout_s
    with contextlib.ExitStack() as acquired:
        reservation = acquired.enter_context(_reserved(spec, actors, deadline, given))
        group = RayGroup(spec, deadline, actors, reservation)
        acquired.callback(group.close_lines)
        acquired.callback(group.end_actors)
        group.start()
        yield group


@contextlib.contextmanager
def _reserved(spec: GroupSpec, actors: Actors, deadline: float, given: Reservation | None) -> Iterator[Reservation]:
    """Reserves resources, and at the end keeps them for the next group of the run or releases them."""
    kept, actors.reservation = actors.reservation, None
    reservation = given or reserve(spec, deadline, kept)
    reservation.reusable = not spec.elastic
    try:
        yield reservation
    finally:
        if reservation.reusable:
            actors.reservation = reservation
        else:
            reservation.release()


def _needs(spec: GroupSpec) -> object:
    """The properties of a spec that the actors of a group depend on."""
    return spec.num_workers, spec.scaling, spec.output.shown_ranks


class RayGroup(RemoteGroup):
    """Workers that are Ray actors.

    Args:
        spec: the group to start.
        deadline: see :class:`~drivetrain.plugin.RemoteGroup`.
        actors: starts the actors, and knows which ones have ended.
        reservation: the resources of the workers.
    """

    def __init__(self, spec: GroupSpec, deadline: float, actors: Actors, reservation: Reservation) -> None:
        super().__init__(spec, deadline)
        self._actors = actors
        self._reservation = reservation
        self._bundle_of: dict[int, int] = {}
        self._spares: set[int] = set()

    def start(self) -> None:
        """Starts the actors, and waits until the train function can be sent to them."""
        for source, handle in self._actors.sources():
            self.watch(source, partial(self._on_ready, handle))
        self._start_actors()
        self._await_actors()
        self._assign_ranks()
        self._set_up_workers(range(len(self.workers)))

    def reduce(self, value: Any) -> Any:
        """See :meth:`drivetrain.plugin.Runtime.reduce`."""
        return reduce_reference(value)

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.Group.replace`."""
        self.restart_deadline(self.spec.start_timeout_s)
        deaths = self._actors.deaths.by_index
        lost = {index: rank for index, rank in self.rank_of.items() if rank in ranks}
        if missing := lost.keys() - deaths.keys():
            raise WorkerDiedError(f"Ray has not reported that workers {sorted(missing)} have ended")
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
                    raise WorkerDiedError(f"worker {index} did not start: {death.reason}")
            self.wait(f"workers {missing} to start on the Ray cluster", ())

    def training_started(self) -> None:
        """Starts spares for the next group of the run."""
        if count := self.spec.scaling.spare_workers:
            nodes = [self.workers[number % len(self.workers)].node_id for number in range(count)]
            self._actors.stock(nodes, (*self.spec.preload, *self.spec.warmup))

    def stop_requested(self) -> None:
        """Releases the resources after this group, so that the next one can find others."""
        self._reservation.reusable = False

    def renew(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.Group.renew`."""
        same = _needs(spec) == _needs(self.spec)
        avoided = any(worker.node_id in spec.avoided for worker in self.workers)
        if not same or avoided or not self._actors.are_of_this_session:
            return False
        spec.interrupts.replace_handlers_of("ray")
        return super().renew(spec)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.Group.stacks`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        read = ray.remote(read_stacks)
        answers = []
        for node, targets in self.stack_targets(ranks).items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            answers.append(read.options(num_cpus=0, scheduling_strategy=place).remote(targets))
        found: dict[int, str] = {}
        with contextlib.suppress(ray.exceptions.RayError):  # a node that does not answer is no reason to hide the rest
            for answer in ray.get(answers, timeout=_STACKS_WAIT_S):
                found.update(answer)
        return found

    def line_closed(self, rank: int) -> None:
        """Waits for Ray, which knows the reason, and reports it at once unless the node was lost."""
        deadline = time.monotonic() + _NOTICE_WAIT_S
        while not self.has_exited(rank) and (remaining := deadline - time.monotonic()) > 0:
            self.handle_ready(remaining)
        if not self.has_exited(rank):
            self._reservation.reusable = False
        self.note_exit(rank, None, "closed its connection to the driver")

    def _start_actors(self) -> None:
        """Finds a process for each worker's share of the cluster: a spare on its node, or else a new one."""
        nodes = self._reservation.nodes() if self.spec.scaling.spare_workers else {}
        first = self._reservation.first
        for bundle in range(first, first + self.spec.num_workers):
            self._start_actor(bundle, nodes)

    def _start_actor(self, bundle: int, nodes: Mapping[int, str]) -> int:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reservation = self._reservation
        index = None
        if bundle in nodes and reservation.has_room_for_spares(bundle):
            index = self._actors.take_spare(nodes[bundle])
        if index is not None:
            self._spares.add(index)
        else:
            resources = dict(reservation.group.bundle_specs[bundle])
            index = self._actors.start(
                self.spec.preload,
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
        """Handles a connection or a death, and reports the deaths of this group's workers."""
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

    def _assign_ranks(self) -> None:
        import ray

        processes = [
            self._actors.introductions[index] for index in sorted(self._bundle_of, key=self._bundle_of.__getitem__)
        ]
        for process in processes:
            if process.index not in self._spares:
                self._reservation.devices[self._bundle_of[process.index]] = process.details
        self._actors.nodes = self.assign_ranks(
            processes,
            {process.index: self._devices(process.index).gpus for process in processes},
            first_node=ray.get_runtime_context().get_node_id(),
            previous_nodes=self._actors.nodes,
        )
        self._report_deaths()

    def _set_up_workers(self, ranks: Sequence[int]) -> None:
        chosen = {index: rank for index, rank in self.rank_of.items() if rank in ranks and index in self._spares}
        self.set_up(ranks, {rank: self._devices(index).environment for index, rank in chosen.items()})

    def _devices(self, index: int) -> Devices:
        """The devices of a worker. Ray has given a spare none, so it uses those that belong to its bundle."""
        return self._reservation.devices.get(self._bundle_of[index], Devices((), {}))

    def end_actors(self) -> None:
        """Ends every worker, and waits for Ray and then for the processes, which exit a little later."""
        self.ignore_interrupts()
        self._actors.settle()
        self._actors.end(self._bundle_of)
        self.await_closed_lines(_CLOSE_WAIT_S)
