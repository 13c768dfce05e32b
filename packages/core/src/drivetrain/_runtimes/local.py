"""The runtime for workers on this machine, which are forked from a server that has already imported the framework."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from drivetrain._hooks.context import WorkerInfo
from drivetrain._plugins.node import gpu_models, names_of_gpus
from drivetrain._runtimes import forkserver
from drivetrain._runtimes.base import GroupSpec, Runtime, rank_environment
from drivetrain._runtimes.connected import ConnectedGroup
from drivetrain._runtimes.output import OutputPipe
from drivetrain._runtimes.reservations import Reservation, gpu_holders, require_free, reserve_gpus, reserves_gpus
from drivetrain._runtimes.resources import (
    OomCounter,
    explain_exit,
    gpus_are_selected,
    partition_gpus,
    required_gpus,
    threads_per_worker,
    usable_cpus,
    visible_gpus,
    workers_that_fit,
)
from drivetrain._runtimes.servers import ForkServers, ServerHandle, kept_servers, wait_for
from drivetrain._runtimes.stacks import collect_stacks
from drivetrain._wire.commands import JoinRun
from drivetrain._worker.leaving import EXIT_LIMIT_S
from drivetrain._worker.output import open_log
from drivetrain.errors import StorageError, WaitTimeoutError, WorkerDiedError

if TYPE_CHECKING:
    from drivetrain.config import ScalingConfig

__all__ = ["LocalRuntime"]

_END_WAIT_S = 10.0
_CLOSE_WAIT_S = 1.0
_DEATH_WAIT_S = 2.0
_GRACE_S = 3.0
_MAX_STARTING = 32
"""The number of workers that may be requested from the server before it has forked them.

The driver and the server would block each other if both waited for space in a buffer. This number of messages always
fits into the buffers of their sockets.
"""


@dataclass(slots=True)
class _Process:
    """A worker process.

    Attributes:
        stacks: the descriptor from which the stacks of the process can be read.
        pid: the process id; 0 until the server has forked the process.
        pidfd: a descriptor that becomes readable when the process exits; None if the process has not been forked yet,
            or exited before the descriptor could be opened.
    """

    stacks: int
    pid: int = 0
    pidfd: int | None = None

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.stacks)
        if self.pidfd is not None:
            os.close(self.pidfd)


class LocalGroup(ConnectedGroup):
    """A group of workers that are forked from a server."""

    def __init__(
        self, spec: GroupSpec, server: ServerHandle, environment: Mapping[str, str], machine_gpus: Sequence[str]
    ) -> None:
        super().__init__(time.monotonic() + spec.start_timeout_s, spec.interrupts)
        self.broken = False
        self._started = time.time()
        self._inherited_state = _inherited_state(spec)
        self._server = server
        self._spec = spec
        self._ranks: dict[int, int] = {}  # token -> rank
        self._processes: dict[int, _Process] = {}  # by rank
        self._outputs: list[OutputPipe] = []
        self._oom_kills = OomCounter()
        self._environment = environment
        self._gpus = partition_gpus(spec.scaling, list(machine_gpus))
        self.watch(server.control, self._read_server)

    def start(self) -> None:
        """Start the workers. Call :meth:`end` afterwards, even if this method raises."""
        self._start_all(range(self._spec.num_workers))

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.Group.replace`."""
        self.restart_deadline(self._spec.start_timeout_s)
        # This makes the group ignore later messages of the server about the old processes.
        self._ranks = {token: rank for token, rank in self._ranks.items() if rank not in ranks}
        for rank in ranks:
            self.forget_rank(rank)
            self._processes.pop(rank).close()
        self._start_all(ranks)

    def _start_all(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._await_processes(_MAX_STARTING - 1)
            self._start(rank, self._gpus[rank], self._environment)
        self._await_processes(0)
        self.workers = tuple(self._describe(rank, self._gpus[rank]) for rank in range(self._spec.num_workers))

    def _await_processes(self, remaining: int) -> None:
        """Wait until at most this number of requested processes have not been forked yet."""
        while len(self._server.requested) > remaining:
            if self.broken:
                raise WorkerDiedError(
                    "[DT-304] the fork server exited while it imported the framework. See its output above"
                )
            ranks = [self._ranks[token] for token in self._server.requested]
            self.wait("the processes of ranks {ranks} to start", ranks)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.Group.stacks`."""
        running = {
            rank: process for rank, process in self._processes.items() if process.pid and rank not in self._exited
        }
        return collect_stacks({rank: (running[rank].pid, running[rank].stacks) for rank in ranks if rank in running})

    def park(self) -> bool:
        """See :meth:`drivetrain.plugin.Group.park`."""
        for output in self._outputs:
            output.drain()
        return super().park() and not self.broken

    def reuse(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.Group.reuse`."""
        return _inherited_state(spec) == self._inherited_state and super().reuse(spec) and not self.broken

    def join_next_run(self, spec: GroupSpec) -> Sequence[bool]:
        """See :meth:`ConnectedGroup.join_next_run`.

        A shown worker sends its output to the driver through a pipe, and the driver writes the log.
        """
        self._spec = spec
        for output in self._outputs:
            output.redirect(open_log(spec.output.log_directory, output.rank), spec.output.console)
        logs, shown = spec.output.log_directory, spec.output.shown_ranks
        return self.join_run(
            {
                rank: JoinRun(rank, logs, keeps_output=rank in shown, imported_since=self._started)
                for rank in range(spec.num_workers)
            }
        )

    def connection_closed(self, rank: int) -> None:
        """Wait for the process to exit. The kernel reports an exit only after closing the descriptors of the process.

        Therefore the exit of this rank is recorded before other ranks report errors about their closed connections to
        it, and becomes the root cause.
        """
        process = self._processes[rank]
        if process.pidfd is not None and wait_for(process.pidfd, select.POLLIN, _DEATH_WAIT_S):
            self._on_exit(rank, _exit_code_of_zombie(process.pid))

    def end(self, *, grace_s: float) -> None:
        """Stop the remaining workers, wait until they exit unless the server is broken, and close all descriptors.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; 0 to send only SIGKILL.
        """
        self.ignore_interrupts()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close_connections)
            cleanup.callback(self._close_pipes)
            if self._server.requested:
                self.broken = True  # the server would fork these workers later, so it is closed with the group
            try:
                if self.let_exit():
                    self._wait_for_exits(EXIT_LIMIT_S + _END_WAIT_S)
                elif grace_s:
                    self._signal_all(signal.SIGTERM)
                    self._wait_for_exits(grace_s)
            finally:  # also if another Ctrl-C ends the wait
                self._signal_all(signal.SIGKILL)
                self._wait_for_exits(_END_WAIT_S)
            for output in self._outputs:
                output.drain()
        if len(self._exited) < len(self._ranks):
            self.broken = True

    def _start(self, rank: int, gpus: tuple[str, ...], environment: Mapping[str, str]) -> None:
        spec = self._spec
        ours, theirs = socket.socketpair()
        stacks_read, stacks_write = os.pipe()
        self._processes[rank] = _Process(stacks_read)
        log = open_log(spec.output.log_directory, rank)
        if rank in spec.output.shown_ranks:
            pipe = OutputPipe(rank, log, spec.output.console)
            self._outputs.append(pipe)
            self.watch(pipe.read_end, lambda: self._show(pipe))
            output = pipe.write_end_for_worker()
        else:
            output = log
        info = self._describe(rank, gpus)
        variables = {
            **environment,
            **rank_environment(info, world_size=spec.num_workers, local_world_size=spec.num_workers),
        }
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        request = forkserver.ForkRequest(
            environment=variables, working_directory=os.getcwd(), module_path=tuple(sys.path)
        )
        try:
            token = self._server.fork(request, (theirs.fileno(), output, stacks_write), timeout_s=self.remaining_s)
        except TimeoutError:
            self.broken = True
            raise WaitTimeoutError(
                "[DT-303] the workers did not start within RunConfig.start_timeout_s; the fork server did not receive "
                f"the request for the process of rank {rank}",
                ranks=(rank,),
            ) from None
        except OSError:
            self.broken = True
            raise WorkerDiedError("[DT-304] the fork server has exited") from None
        finally:
            theirs.close()
            os.close(output)
            os.close(stacks_write)
            self.add_connection(rank, ours)
        self._ranks[token] = rank

    def _describe(self, rank: int, gpus: tuple[str, ...]) -> WorkerInfo:
        return WorkerInfo(
            rank=rank,
            local_rank=rank,
            node_rank=0,
            node_id="localhost",
            hostname=socket.gethostname(),
            ip="127.0.0.1",
            pid=self._processes[rank].pid,
            accelerator_ids=gpus,
            accelerator_names=names_of_gpus(gpus, gpu_models()) if gpus else (),
        )

    def _read_server(self) -> None:
        if not self._await_server(0.0):
            return  # _await_exit_code() has read the message that this event announced
        received = forkserver.receive(self._server.control)
        if received is None:
            self.broken = True
            self.forget(self._server.control)
            for orphan in range(self._spec.num_workers):
                process = self._processes.get(orphan)  # None if it was not requested yet
                if process is not None and process.pid and not self.has_exited(orphan):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)  # the kernel kills the worker, but not its children
                self.note_exit(orphan, None, "was killed because the fork server exited")
            return
        kind, token, value = received[0]
        self._server.requested.discard(token)
        rank = self._ranks.get(token)
        if rank is None:
            return  # the message is about a worker of an earlier group, or about a replaced worker
        if kind == "forked":
            self._watch_process(rank, value)
        elif kind == "exited":
            self._on_exit(rank, value)

    def _watch_process(self, rank: int, pid: int) -> None:
        """Watch for the exit of a process directly, because the server may be busy importing."""
        process = self._processes[rank]
        process.pid = pid
        with contextlib.suppress(ProcessLookupError):  # it has exited already; the server will report that
            process.pidfd = os.pidfd_open(pid)
            self.watch(process.pidfd, lambda: self._on_exit(rank, _exit_code_of_zombie(pid)))

    def _on_exit(self, rank: int, exit_code: int | None) -> None:
        if (pidfd := self._processes[rank].pidfd) is not None:
            self.forget(pidfd)
        if exit_code is None:
            self._await_exit_code(rank)
        else:
            self._read_output(rank)
            reason, kind = explain_exit(exit_code, self._oom_kills)
            self.note_exit(rank, exit_code, reason, kind)

    def _await_exit_code(self, rank: int) -> None:
        """Wait for the exit code of a process that the server has reaped, before the consequences are processed."""
        deadline = time.monotonic() + _DEATH_WAIT_S
        while not self.has_exited(rank) and not self.broken and self._await_server(deadline - time.monotonic()):
            self._read_server()

    def _await_server(self, seconds: float) -> bool:
        """Wait until the server has sent a message. Return False after the timeout."""
        return wait_for(self._server.control, select.POLLIN, seconds)

    def _show(self, pipe: OutputPipe) -> None:
        pipe.read()
        if pipe.closed:
            self.forget(pipe.read_end)

    def _read_output(self, rank: int) -> None:
        for output in self._outputs:
            if output.rank == rank:
                output.drain()

    def _signal_all(self, number: int) -> None:
        for rank, process in self._processes.items():
            if rank not in self._exited and process.pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, number)
                    if number == signal.SIGKILL:  # also kill its children; the server kills those that remain
                        os.killpg(process.pid, number)

    def _wait_for_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._exited) < len(self._ranks) and not self.broken:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self.handle_ready(remaining)

    def _close_pipes(self) -> None:
        for process in self._processes.values():
            process.close()
        for output in self._outputs:
            output.close()


class LocalRuntime(Runtime):
    """Starts workers on this machine.

    Args:
        gpus: the ids of the GPUs that workers may use, as in ``CUDA_VISIBLE_DEVICES``; None for all GPUs that this
            process may use.
        servers: keeps the fork servers from which workers are forked; None for the default object of this process.
        wait: what to do if other runs on this machine use GPUs that the run needs: True to wait until they are free,
            False to raise a :class:`~drivetrain.ResourceError`.
    """

    name = "local"
    _gpus: Sequence[str] | None = None
    _servers = kept_servers
    _wait = True
    _room = 0  # the number of workers for which there was room lately, if each needs GPUs of its own

    def __init__(
        self, *, gpus: Sequence[str] | None = None, servers: ForkServers | None = None, wait: bool = True
    ) -> None:
        self._gpus = gpus
        self._servers = servers or kept_servers
        self._wait = wait

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle this runtime without its arguments, which are valid in this process only."""
        return (partial(type(self), wait=False), ()) if not self._wait else (type(self), ())

    @cached_property
    def _reservations(self) -> WeakKeyDictionary[contextlib.ExitStack, Reservation]:
        """The GPUs of each run that uses this object, by the run's resources."""
        return WeakKeyDictionary()

    def _visible_gpus(self) -> list[str]:
        return visible_gpus() if self._gpus is None else list(self._gpus)

    def validate(self, scaling: ScalingConfig) -> None:
        """Check that this machine has enough GPUs for the minimum number of workers, free ones if it must not wait."""
        smallest, gpus = replace(scaling, num_workers=scaling.min_workers), self._visible_gpus()
        partition_gpus(smallest, gpus)
        if scaling.use_gpu and not self._wait and not _may_share_gpus(scaling):
            require_free(gpus, required_gpus(smallest))

    def ignored_settings(self, scaling: ScalingConfig) -> list[str]:
        """Return the settings about a cluster, and about more CPUs than this machine has."""
        resources = scaling.resources_per_worker or {}
        names = [f"resources_per_worker[{name!r}]" for name in resources if name not in ("CPU", "GPU")]
        names += [
            name
            for name, is_set in (
                ("trainer_resources", scaling.trainer_resources),
                ("accelerator_type", scaling.accelerator_type),
                (f"placement_strategy={scaling.placement_strategy!r}", "SPREAD" in scaling.placement_strategy),
            )
            if is_set
        ]
        notices = [f"ScalingConfig: the local runtime ignores {', '.join(names)}"] if names else []
        if not scaling.use_gpu and (gpus := self._visible_gpus()):
            notices.append(
                f"ScalingConfig: the workers compute on the CPU, although this machine has GPUs ({', '.join(gpus)}). "
                "To use them, set use_gpu=True (drivetrain run: --use-gpu). To hide them, set CUDA_VISIBLE_DEVICES=''"
            )
        wanted = (scaling.num_cpus_per_worker or 0) * scaling.max_workers
        if wanted > (available := usable_cpus()):
            notices.append(
                f"ScalingConfig: the workers request {wanted:g} CPUs, but share the {available} CPUs of this machine"
            )
        return notices

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Return the number of workers for which there are free GPUs; the maximum number if workers use no GPUs."""
        gpus = self._visible_gpus()
        if not scaling.use_gpu or _may_share_gpus(scaling):
            return workers_that_fit(scaling, len(gpus))
        held = {holder.gpu for holder in gpu_holders(without=list(self._reservations.values()))}
        self._room = workers_that_fit(scaling, sum(gpu not in held for gpu in gpus))
        return self._room

    def _reserve(self, spec: GroupSpec) -> Sequence[str]:
        """Return the GPUs of a run, which stay reserved until the run ends."""
        gpus, count = self._visible_gpus(), required_gpus(replace(spec.scaling, num_workers=spec.num_workers))
        if count == 0 or count > len(gpus) or not reserves_gpus():
            return gpus
        console = spec.output.console
        reservation = self._reservations.get(spec.run_resources)
        if reservation is None:
            try:
                reservation = Reservation(console.name or "without a name")
            except StorageError as error:
                remedy = "Set DRIVETRAIN_GPU_RESERVATIONS to a directory of your own, or to off"
                console.print(f"{console.name}: other runs may use the same GPUs: {error}. {remedy}", error=True)
                return gpus
            spec.run_resources.callback(reservation.release)
            self._reservations[spec.run_resources] = reservation
        may_shrink = spec.elastic and self._room >= spec.num_workers
        return reserve_gpus(reservation, spec, gpus, count, wait=self._wait, may_shrink=may_shrink)

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[LocalGroup]:
        """Fork the workers. When the context is left, kill them.

        After Ctrl-C, send SIGTERM first, and wait up to three seconds before killing the workers.
        """
        spec = replace(spec, preload=(*spec.preload, *spec.warmup))
        environment, gpus = _environment(spec), self._reserve(spec)
        server = self._servers.acquire(spec, environment)
        group: LocalGroup | None = None
        grace_s = 0.0
        try:
            group = LocalGroup(spec, server, environment, gpus)
            group.start()
            yield group
        except KeyboardInterrupt:
            grace_s = _GRACE_S
            raise
        finally:
            self._end(group, server, grace_s)

    def _end(self, group: LocalGroup | None, server: ServerHandle, grace_s: float) -> None:
        done: Callable[[], None] = server.close
        try:
            if group is not None:
                done = partial(server.close, wait_s=_CLOSE_WAIT_S)
                group.end(grace_s=grace_s)
                if not group.broken:
                    done = partial(self._servers.release, server)
        finally:
            done()


def _may_share_gpus(scaling: ScalingConfig) -> bool:
    """Return True if the workers of a run can use GPUs that another run has reserved."""
    return 0 < scaling.num_gpus_per_worker < 1 or gpus_are_selected()


def _environment(spec: GroupSpec) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads_per_worker(spec.scaling)), **os.environ, **spec.environment}


def _inherited_state(spec: GroupSpec) -> object:
    """Return the state that a worker process inherits from the driver and the run when the process is forked."""
    requested = spec.num_workers, spec.scaling, spec.output.shown_ranks, tuple(spec.preload)
    return *requested, _environment(spec), os.getcwd(), tuple(sys.path)


def _exit_code_of_zombie(pid: int) -> int | None:
    """Return the exit code of a process that has exited, but was not reaped by its parent yet; otherwise None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, wait_status = fields[0], int(fields[-1])
    return os.waitstatus_to_exitcode(wait_status) if state == b"Z" else None
