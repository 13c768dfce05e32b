"""The base class of groups whose workers run on the nodes of a cluster and connect to the driver over the network."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from drivetrain._base.console import Console
from drivetrain._hooks.context import WorkerInfo
from drivetrain._plugins.node import differing_versions, names_of_gpus, own_versions
from drivetrain._runtimes.base import GroupSpec, rank_environment
from drivetrain._runtimes.connected import ConnectedGroup
from drivetrain._runtimes.resources import accelerator_sort_key, order_nodes
from drivetrain._wire.commands import JoinRun
from drivetrain._wire.handshake import Introduction
from drivetrain.errors import WorkerDiedError

__all__ = ["RemoteGroup"]

_warned: set[str] = set()
"""The warnings about versions that this process has shown."""


class RemoteGroup(ConnectedGroup):
    """A group of processes that called :func:`~drivetrain.plugin.runtimes.worker_main`, on any number of nodes.

    A runtime derives its group class from this class. The runtime starts the processes, waits for their introductions
    with a :class:`~drivetrain.plugin.runtimes.WorkerListener`, and then calls :meth:`assign_ranks` and :meth:`set_up`.
    It calls
    :meth:`note_exit` when a process has exited.

    Args:
        spec: the group to start.
        deadline: the time on the monotonic clock by which every worker must be running the train function.

    Attributes:
        spec: the group that the current run requested.
        rank_of: the rank of each process, by the index that the process sent in its introduction.
    """

    def __init__(self, spec: GroupSpec, deadline: float) -> None:
        super().__init__(deadline, spec.interrupts)
        self.spec = spec
        self.rank_of: dict[int, int] = {}
        self._started = time.time()
        self._stacks: dict[int, int] = {}

    def assign_ranks(
        self,
        processes: Sequence[Introduction],
        gpus: Mapping[int, tuple[str, ...]],
        *,
        first_node: str,
        previous_nodes: Sequence[str] = (),
        other_accelerators: Mapping[int, Mapping[str, tuple[str, ...]]] | None = None,
    ) -> list[str]:
        """Make connected processes the workers of the group.

        The processes of a node get consecutive ranks, sorted by their GPUs and then by their other accelerators.

        Args:
            processes: the introductions of the processes. On each node, processes without GPUs keep this order.
            gpus: a mapping from the index in a process's introduction to the GPUs of that process.
            first_node: the id of the node that precedes all other new nodes, usually the driver's node.
            previous_nodes: the ids of the nodes of the run's previous group, in the order of their ranks. Nodes that
                are still used keep this order, and new nodes take the places of lost ones.
            other_accelerators: a mapping from the index in a process's introduction to the other accelerators of that
                process; see :class:`drivetrain.plugin.WorkerInfo`.

        Returns:
            The ids of the nodes, in the order of their ranks.
        """
        nodes = order_nodes({process.facts["node_id"] for process in processes}, first_node, previous_nodes)
        node_ranks = {node: node_rank for node_rank, node in enumerate(nodes)}

        others = other_accelerators or {}

        def place(process: Introduction) -> tuple[int, object]:
            assigned = [gpus[process.index], *others.get(process.index, {}).values()]
            return node_ranks[process.facts["node_id"]], tuple(map(accelerator_sort_key, assigned))

        workers: list[WorkerInfo] = []
        on_node: Counter[int] = Counter()
        for rank, process in enumerate(sorted(processes, key=place)):
            node_rank = node_ranks[process.facts["node_id"]]
            workers.append(
                WorkerInfo(
                    rank=rank,
                    local_rank=on_node[node_rank],
                    node_rank=node_rank,
                    accelerator_ids=gpus[process.index],
                    other_accelerators=others.get(process.index, {}),
                    accelerator_names=names_of_gpus(gpus[process.index], process.gpu_models),
                    **process.facts,
                )
            )
            on_node[node_rank] += 1
            self._add_process(rank, process)
        self.workers = tuple(workers)
        _warn_of_versions(self.workers, self.spec.output.console)
        return nodes

    def take_over(self, rank: int, process: Introduction) -> None:
        """Give a new process the rank of a lost process. Call :meth:`forget_rank` for that rank before this method.

        Raises:
            WorkerDiedError: the new process is on another node.
        """
        worker = self.workers[rank]
        if process.facts["node_id"] != worker.node_id:
            raise WorkerDiedError(f"the new worker of rank {rank} is not on the node of the lost one", rank=rank)
        self.workers = (*self.workers[:rank], replace(worker, **process.facts), *self.workers[rank + 1 :])
        self._add_process(rank, process)

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.Group.replace`. By default, the whole group is replaced instead.

        Raises:
            WorkerDiedError: always.
        """
        raise WorkerDiedError(f"this runtime replaces no single processes, got the lost ranks {list(ranks)}")

    def set_up(self, ranks: Sequence[int], environment: Mapping[int, Mapping[str, str]]) -> None:
        """Send processes the environment variables of their ranks, the driver's module path, and their log directory.

        Args:
            ranks: the ranks of the processes.
            environment: a mapping from ranks to further environment variables, for processes that were started before
                the resources of their ranks were known.
        """
        threads = {"OMP_NUM_THREADS": str(max(1, math.floor(self.spec.scaling.num_cpus_per_worker or 1)))}
        commands = {}
        on_node = Counter(worker.node_rank for worker in self.workers)
        for rank in ranks:
            worker = self.workers[rank]
            variables = rank_environment(
                worker,
                world_size=len(self.workers),
                local_world_size=on_node[worker.node_rank],
                nodes=len(on_node),
            )
            if rank in environment:
                variables |= {**threads, **environment[rank]}
            commands[rank] = replace(self._join(rank, self.spec), environment=variables, defaults=threads)
        self.join_run(commands)

    def join_next_run(self, spec: GroupSpec) -> Sequence[bool]:
        """See :meth:`ConnectedGroup.join_next_run`."""
        self.spec = spec
        ranks = range(len(self.workers))
        return self.join_run({rank: replace(self._join(rank, spec), imported_since=self._started) for rank in ranks})

    def stack_targets(self, ranks: Sequence[int]) -> dict[str, dict[int, tuple[int, int]]]:
        """Return, for each node id, the argument of :func:`~drivetrain.plugin.runtimes.read_stacks`.

        Processes that have exited are left out.
        """
        targets: dict[str, dict[int, tuple[int, int]]] = {}
        for rank in ranks:
            if rank in self._stacks and not self.has_exited(rank):
                worker = self.workers[rank]
                targets.setdefault(worker.node_id, {})[rank] = (worker.pid, self._stacks[rank])
        return targets

    def _add_process(self, rank: int, process: Introduction) -> None:
        self.rank_of[process.index] = rank
        self._stacks[rank] = process.stacks
        self.add_connection(rank, process.connection)

    def _join(self, rank: int, spec: GroupSpec) -> JoinRun:
        shown = rank in spec.output.shown_ranks
        if shown:
            self.show_output(rank, spec.output.console)
        return JoinRun(rank, log_directory=spec.output.log_directory, shown=shown, module_path=tuple(sys.path))


def _warn_of_versions(workers: Sequence[WorkerInfo], console: Console) -> None:
    """Say which nodes, and whether the driver, have other versions than the node of rank 0."""
    first = workers[0]
    others = {f"the driver on {socket.gethostname()}": own_versions()}
    others |= {worker.hostname: worker.versions for worker in workers if worker.local_rank == 0}
    for place, versions in others.items():
        found = ", ".join(
            f"{name} {versions[name]} instead of {first.versions[name]}"
            for name in sorted(differing_versions(first.versions, versions))
        )
        line = f"{place} has other versions than {first.hostname}: {found}. Install the same versions on all nodes"
        if found and line not in _warned:
            _warned.add(line)
            console.print(f"{console.name}: {line}", error=True)
