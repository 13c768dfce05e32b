"""Workers as Ray actors in a placement group, on a cluster that is connected or on one started here.

Ray places the actors, and tells when one is gone. What workers report comes over a TCP connection that each of them
opens to the driver, as over the local runtime's sockets: a report costs no actor call, and nothing polls.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain import WorkerDiedError, WorkerInfo
from drivetrain.plugin import GroupSpec, RemoteGroup, TrainTask, log_name, order_gpus, order_nodes, rank_environment
from drivetrain_ray._actors import UNREACHABLE, Actors, kind_of_death, names_node
from drivetrain_ray._cluster import Reservation, note_unreachable, reserve
from drivetrain_ray._references import reduce_reference
from drivetrain_ray._worker import HELLO_WAIT_S, Devices, join_run, read_stacks, set_up

__all__ = ["RayGroup"]

_NOTICE_WAIT_S = 4.0
"""Ray notices after 2 s that a node is gone without a word."""
_CLOSE_WAIT_S = 1.0


class RayGroup(RemoteGroup):
    """Workers that are Ray actors."""

    def __init__(
        self, spec: GroupSpec, actors: Actors, resources: contextlib.ExitStack, given: Reservation | None = None
    ) -> None:
        super().__init__(time.monotonic() + spec.start_timeout_s, spec.interrupts)
        resources.callback(self.close_lines)
        self._spec = spec
        self._started = time.time()
        self._actors = actors
        actors.join_session()
        self._rank_of: dict[int, int] = {}
        self._stack_pipes: dict[int, int] = {}
        self._keeps_reservation = not spec.elastic
        for source, handle in actors.sources():
            self.watch(source, partial(self._hear, handle))
        kept, actors.reservation = actors.reservation, None
        self._reservation = given or reserve(spec, self._deadline, kept)
        resources.callback(self._give_back)
        self._bundle_of: dict[int, int] = {}
        self._spares: set[int] = set()
        resources.callback(self._end_actors)
        self._start_actors()
        self._await_actors()
        self._assign_ranks()
        self._set_up_workers(self._rank_of)

    def reduce(self, value: Any) -> Any:
        """See :meth:`drivetrain.plugin.Runtime.reduce`."""
        return reduce_reference(value)

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.Group.replace`."""
        self._deadline = time.monotonic() + self._spec.start_timeout_s
        lost = {index: rank for index, rank in self._rank_of.items() if rank in ranks}
        if missing := lost.keys() - self._actors.dead.keys():
            raise WorkerDiedError(f"Ray does not say of workers {sorted(missing)} that they have ended")
        if gone := [rank for index, rank in lost.items() if names_node(self._actors.dead[index])]:
            raise WorkerDiedError(f"the nodes of ranks {gone} are gone")
        rank_of: dict[int, int] = {}
        for index, rank in lost.items():
            self.forget_rank(rank)
            del self._rank_of[index]
            self._spares.discard(index)
            rank_of[self._start_actor(self._bundle_of.pop(index), {})] = rank
        self._await_actors()
        workers = list(self.workers)
        for index, rank in rank_of.items():
            hello = self._actors.hellos[index]
            if hello.facts["node_id"] != workers[rank].node_id:
                raise WorkerDiedError(f"the new worker of rank {rank} is not on the node of the lost one", rank=rank)
            workers[rank] = replace(workers[rank], **hello.facts)
            self.add_line(rank, hello.connection)
        self._rank_of |= rank_of
        self.workers = tuple(workers)
        self._set_up_workers(rank_of)

    def _await_actors(self) -> None:
        while missing := sorted(set(self._bundle_of) - set(self._actors.hellos)):
            for index in missing:
                if index in self._actors.dead:
                    raise WorkerDiedError(f"worker {index} did not start: {self._actors.dead[index]}")
            self.wait(f"workers {missing} to start on the Ray cluster", ())

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """See :meth:`drivetrain.plugin.Group.train`; has spares for a next group be started."""
        super().train(tasks)
        if count := self._spec.scaling.spare_workers:
            nodes = [self.workers[number % len(self.workers)].node_id for number in range(count)]
            self._actors.stock(nodes, (*self._spec.preload, *self._spec.warmup))

    def stop_requested(self) -> None:
        """The next group finds another place."""
        self._keeps_reservation = False

    def renew(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.Group.renew`."""
        mine = self._spec
        same = (spec.num_workers, spec.scaling, spec.shown_ranks) == (mine.num_workers, mine.scaling, mine.shown_ranks)
        avoided = any(worker.node_id in spec.avoided for worker in self.workers)
        if not same or avoided or not self._actors.are_of_this_session:
            return False
        spec.interrupts.replace_handlers_of("ray")
        return super().renew(spec)

    def settle_in(self, spec: GroupSpec) -> Sequence[bool]:
        """Has the workers write to the run's logs, where they see them."""
        self._spec = spec
        arguments = {worker.rank: (worker.rank, *self._output_of(worker.rank, spec)) for worker in self.workers}
        return self.run_each(join_run, {rank: (*own, self._started) for rank, own in arguments.items()})

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.Group.stacks`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        by_node: dict[str, dict[int, tuple[int, int]]] = {}
        for rank in ranks:
            if rank in self._stack_pipes and not self.has_exited(rank):
                worker = self.workers[rank]
                by_node.setdefault(worker.node_id, {})[rank] = (worker.pid, self._stack_pipes[rank])
        ask = ray.remote(read_stacks)
        answers = [
            ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                targets
            )
            for node, targets in by_node.items()
        ]
        found: dict[int, str] = {}
        with contextlib.suppress(ray.exceptions.RayError):  # a node that does not answer is no reason to hide the rest
            for answer in ray.get(answers, timeout=HELLO_WAIT_S):
                found.update(answer)
        return found

    def line_closed(self, rank: int) -> None:
        """Ray knows more about why, and says so at once, unless it is the node that is gone."""
        deadline = time.monotonic() + _NOTICE_WAIT_S
        while not self.has_exited(rank) and (remaining := deadline - time.monotonic()) > 0:
            self.handle_ready(remaining)
        if not self.has_exited(rank):
            self._keeps_reservation = False
        self.note_exit(rank, None, "closed its connection to the driver")

    def _start_actors(self) -> None:
        """Finds a process for each worker's share of the cluster: a spare on its node, or else a new one."""
        nodes = self._reservation.nodes() if self._spec.scaling.spare_workers else {}
        first = self._reservation.first
        for bundle in range(first, first + self._spec.num_workers):
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
                self._spec.preload,
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    reservation.group, placement_group_bundle_index=bundle
                ),
            )
        self._bundle_of[index] = bundle
        return index

    def _hear(self, handle: Callable[[], None]) -> None:
        """Passes on which of the workers are gone."""
        handle()
        for index in self._rank_of.keys() & self._actors.dead.keys():
            self._note_death(index)

    def _note_death(self, index: int) -> None:
        reason = self._actors.dead[index]
        if names_node(reason):
            self._keeps_reservation = False
        if reason == UNREACHABLE:
            note_unreachable(self.workers[self._rank_of[index]].node_id)
        self.note_exit(self._rank_of[index], None, reason, kind_of_death(reason))

    def _assign_ranks(self) -> None:
        """Packs ranks by node, in the order of the last group's nodes, and of the GPUs on each."""
        import ray

        hellos = {index: self._actors.hellos[index] for index in self._bundle_of}
        for index in hellos.keys() - self._spares:
            self._reservation.devices[self._bundle_of[index]] = hellos[index].devices
        gpus = {index: self._devices(index).gpus for index in hellos}
        here = ray.get_runtime_context().get_node_id()
        nodes = order_nodes({hello.facts["node_id"] for hello in hellos.values()}, here, self._actors.nodes)
        self._actors.nodes = nodes
        places = {
            index: (nodes.index(hello.facts["node_id"]), order_gpus(gpus[index]), self._bundle_of[index])
            for index, hello in hellos.items()
        }
        order = sorted(hellos, key=lambda index: places[index])
        workers: list[WorkerInfo] = []
        for rank, index in enumerate(order):
            self._rank_of[index] = rank
            node_rank = nodes.index(hellos[index].facts["node_id"])
            workers.append(
                WorkerInfo(
                    rank=rank,
                    local_rank=sum(worker.node_rank == node_rank for worker in workers),
                    node_rank=node_rank,
                    accelerator_ids=gpus[index],
                    **hellos[index].facts,
                )
            )
            self.add_line(rank, hellos[index].connection)
        self.workers = tuple(workers)
        for index in self._rank_of.keys() & self._actors.dead.keys():
            self._note_death(index)

    def _devices(self, index: int) -> Devices:
        """What a worker is to use: a spare was not given by Ray what is its now."""
        return self._reservation.devices.get(self._bundle_of[index], Devices((), {}))

    def _set_up_workers(self, rank_of: Mapping[int, int]) -> None:
        spec = self._spec
        threads = {"OMP_NUM_THREADS": str(max(1, math.floor(spec.scaling.num_cpus_per_worker or 1)))}
        arguments: dict[int, tuple[Any, ...]] = {}
        for index, rank in rank_of.items():
            worker = self.workers[rank]
            local_world_size = sum(other.node_rank == worker.node_rank for other in self.workers)
            environment = rank_environment(worker, world_size=len(self.workers), local_world_size=local_world_size)
            if index in self._spares:
                environment |= {**threads, **self._devices(index).environment}
            arguments[rank] = (rank, environment, threads, *self._output_of(rank, spec))
        self._stack_pipes |= zip(arguments, self.run_each(set_up, arguments), strict=True)

    def _output_of(self, rank: int, spec: GroupSpec) -> tuple[Sequence[str], Path | None, bool]:
        """What a worker is told of its module path and its output; that of some is shown."""
        log = spec.log_directory / log_name(rank) if spec.log_directory else None
        shown = rank in spec.shown_ranks
        if shown:
            self.show_output(rank, spec.console)
        return tuple(sys.path), log, shown

    def _end_actors(self) -> None:
        """Ends every worker, and waits until Ray has seen to it, and its process has ended: Ray tells a bit earlier."""
        self.ignore_interrupts()
        self._actors.settle()
        self._actors.end(self._bundle_of)
        self.await_closed_lines(_CLOSE_WAIT_S)

    def _give_back(self) -> None:
        """Leaves the run's share of the cluster to its next group, which is to be of the same size, or to others."""
        if self._keeps_reservation:
            self._actors.reservation = self._reservation
        else:
            self._reservation.release()
