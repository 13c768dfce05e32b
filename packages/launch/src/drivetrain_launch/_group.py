"""A worker group whose workers are children of supervisors."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Collection, Iterable, Sequence

from drivetrain import FailureKind, WorkerDiedError
from drivetrain.plugin.processes import EXIT_LIMIT_S, describe_exit
from drivetrain.plugin.runtimes import GroupSpec, RemoteGroup, WorkerListener
from drivetrain_launch._launch import Launch, Supervisor
from drivetrain_launch._shares import Share, divide
from drivetrain_launch._supervisor import SendStacks, StartWorker

__all__ = ["CommandGroup"]

_NOTICE_WAIT_S = 4.0
"""Maximum wait in seconds for the second of two notices of an exit: from the worker's connection and its supervisor."""
_COMMAND_WAIT_S = 1.0
"""Maximum wait in seconds for the exit of a command whose supervisor was lost, because its output may give a reason."""
_EXIT_WAIT_S = EXIT_LIMIT_S + 5.0
_STACKS_WAIT_S = 10.0
"""Maximum wait in seconds for the stacks, which the supervisors read and send."""


class CommandGroup(RemoteGroup):
    """A group of workers that supervisors fork.

    Args:
        spec: the group to start.
        deadline: see :class:`~drivetrain.plugin.runtimes.RemoteGroup`.
        launch: the commands and supervisors of the run.
    """

    def __init__(self, spec: GroupSpec, deadline: float, launch: Launch) -> None:
        super().__init__(spec, deadline)
        self._launch = launch
        self._shares: dict[int, Share] = {}
        self._closed: set[int] = set()  # ranks whose connection is closed
        self._exiting: dict[int, float] = {}  # when the exit of a rank was noticed first, on the monotonic clock

    def start(self) -> None:
        """Wait for the supervisors, start the workers, and wait until they are ready to receive the train function."""
        launch, count = self._launch, self.spec.num_workers
        self.watch(launch.fileno(), self._on_launch)
        while missing := count - len(launch.supervisors):
            self._require_commands()
            self.wait(f"{missing} of {count} workers to connect to {launch.spec.address}; {launch.describe()}", ())
        launch.note_connected()
        self._shares = divide(
            self.spec.scaling,
            {index: supervisor.visible for index, supervisor in launch.supervisors.items()},
            may_be_confined=launch.spec.template.starts_all_workers,
        )
        self._start_workers(range(count))
        launch.nodes = self.assign_ranks(
            [launch.workers[index] for index in range(count)],
            {index: share.gpus for index, share in self._shares.items()},
            first_node=socket.gethostname(),
            previous_nodes=launch.nodes,
        )
        self.set_up(range(count), {})

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.runtimes.Group.replace`. The same supervisor starts the new process."""
        self.restart_deadline(self.spec.start_timeout_s)
        lost = {index: rank for index, rank in self.rank_of.items() if rank in ranks}
        for index, rank in lost.items():
            if self._launch.supervisors[index].is_lost:
                raise WorkerDiedError(f"the supervisor of rank {rank} was lost", rank=rank)
        for index, rank in lost.items():
            self.forget_rank(rank)
            self._closed.discard(rank)
            del self.rank_of[index]
        self._start_workers(lost)
        for index, rank in lost.items():
            self.take_over(rank, self._launch.workers[index])
        self.set_up(ranks, {})

    def reuse(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.runtimes.Group.reuse`."""
        return _settings(spec) == _settings(self.spec) and super().reuse(spec)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.runtimes.Group.stacks`. The supervisors send the stacks over new connections."""
        targets = {rank: target for node in self.stack_targets(ranks).values() for rank, target in node.items()}
        stacks: dict[int, str] = {}
        spec, token = self._launch.spec, self._launch.address.token
        listener = WorkerListener(spec.address, expected=len(targets), token=token, ports=spec.ports)
        with contextlib.closing(listener):
            for rank, (pid, descriptor) in targets.items():
                self._supervisor(rank).send(SendStacks(listener.address.port, rank, pid, descriptor))
            deadline = time.monotonic() + _STACKS_WAIT_S
            poller = select.poll()
            poller.register(listener, select.POLLIN)
            while len(stacks) < len(targets) and (remaining := deadline - time.monotonic()) > 0:
                poller.poll(1000 * remaining)
                if (response := listener.accept()) is not None:
                    response.connection.close()
                    stacks[response.index] = response.details
        return stacks

    def connection_closed(self, rank: int) -> None:
        """Wait for the supervisor's report about the exit of the process."""
        self._closed.add(rank)
        self._await_exits([rank])

    def end(self) -> None:
        """Let the processes exit if their train functions have returned, and kill them otherwise."""
        self.ignore_interrupts()
        self.forget(self._launch.fileno())
        if self.let_exit():
            self.wait_for_closed_connections(_EXIT_WAIT_S)
        self._launch.stop_workers()

    def _start_workers(self, indices: Collection[int]) -> None:
        """Start the workers with these indices, and wait until they have connected."""
        launch = self._launch
        launch.is_starting_workers = True
        for index in indices:
            launch.workers.pop(index, None)
            share = self._shares[index]
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else {}
            launch.supervisors[index].send(
                StartWorker(
                    index,
                    environment={**self.spec.environment, **devices},
                    defaults={"OMP_NUM_THREADS": str(share.threads)},
                    working_directory=os.getcwd(),
                    module_path=tuple(sys.path),
                    preload=tuple(self.spec.preload),
                )
            )
        while missing := [index for index in indices if index not in launch.workers]:
            self._require_commands()
            for index in missing:
                if (exited := launch.supervisors[index].exited) is not None:
                    how = exited.reason or describe_exit(exited.exit_code)
                    raise WorkerDiedError(f"[DT-310] worker {index} {how} during its start; {launch.describe(index)}")
            self.wait(f"workers {missing} to start; {launch.describe(missing[0])}", ())
        launch.is_starting_workers = False

    def _require_commands(self) -> None:
        """Raise an error if a command has exited early, because its workers will never connect."""
        if (failure := self._launch.find_failure()) is not None:
            raise WorkerDiedError(f"[DT-310] the workers did not start: {failure}")

    def _on_launch(self) -> None:
        """Handle connections, output and exits, and record which workers of this group have exited."""
        self._launch.handle()
        supervisors = self._launch.supervisors
        self._await_exits(
            rank for index, rank in self.rank_of.items() if supervisors[index].exited or supervisors[index].is_lost
        )

    def _await_exits(self, ranks: Iterable[int]) -> None:
        """Record the exits of workers, once their connections are closed and their supervisors have reported the exits.

        The report may overtake the last messages of the worker, because they arrive over another connection. A wait for
        it may call this method again for other ranks. Only the outermost call waits: for all ranks together, and with a
        stack whose depth does not depend on their number.
        """
        is_outermost = not self._exiting
        for rank in ranks:
            if not self.has_exited(rank):
                self._exiting.setdefault(rank, time.monotonic())
        if not is_outermost:
            return
        try:
            while self._exiting:
                now = time.monotonic()
                waits = {rank: began + self._wait_s(rank) - now for rank, began in self._exiting.items()}
                for rank in [rank for rank, wait_s in waits.items() if wait_s <= 0]:
                    self._record_exit(rank)
                    del self._exiting[rank], waits[rank]
                if waits:
                    self.handle_ready(min(waits.values()))
        finally:
            self._exiting.clear()

    def _wait_s(self, rank: int) -> float:
        """Return how long to wait for the cause of an exit, from the first notice, as far as it is known now."""
        supervisor = self._supervisor(rank)
        if rank not in self._closed or not (supervisor.exited or supervisor.is_lost):
            return _NOTICE_WAIT_S
        if supervisor.exited or self._launch.has_command_exited(self._index(rank)):
            return 0.0
        return _COMMAND_WAIT_S

    def _record_exit(self, rank: int) -> None:
        supervisor = self._supervisor(rank)
        if supervisor.exited is not None:
            self.note_exit(rank, supervisor.exited.exit_code, supervisor.exited.reason, supervisor.exited.kind)
        elif supervisor.is_lost:
            kind = FailureKind.PREEMPTION if supervisor.is_terminating else FailureKind.INFRASTRUCTURE
            self.note_exit(rank, None, f"was lost: {self._launch.describe(self._index(rank))}", kind)
        else:
            self.note_exit(rank, None, "closed its connection to the driver")

    def _index(self, rank: int) -> int:
        return next(index for index, own in self.rank_of.items() if own == rank)

    def _supervisor(self, rank: int) -> Supervisor:
        return self._launch.supervisors[self._index(rank)]


def _settings(spec: GroupSpec) -> object:
    """Return the settings on which workers depend: a group can be reused only if they are equal."""
    return spec.num_workers, spec.scaling, spec.output.shown_ranks, dict(spec.environment)
