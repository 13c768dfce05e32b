"""Worker processes on this machine, forked from a server process that has imported the framework already."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain._hooks.context import WorkerInfo
from drivetrain._runtimes import forkserver
from drivetrain._runtimes.base import GroupSpec, Runtime, rank_environment
from drivetrain._runtimes.connected import ConnectedGroup
from drivetrain._runtimes.resources import OomCounter, partition_gpus, threads_per_worker, visible_gpus
from drivetrain._wire.commands import JoinRun
from drivetrain._worker.output import OutputPipe, open_log
from drivetrain._worker.stacks import collect_stacks
from drivetrain.errors import FailureKind, WorkerDiedError

if TYPE_CHECKING:
    from drivetrain.config import ScalingConfig

__all__ = ["ForkServers", "LocalRuntime"]

_END_WAIT_S = 10.0
_DEATH_WAIT_S = 2.0
_INTERPRETER_VARIABLES = ("PYTHON", "LD_", "MALLOC_")
_GRACE_S = 3.0


class _Server:
    """The driver's side of a fork server process."""

    def __init__(self, key: object, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self.key = key
        self.owner = os.getpid()
        self.started = time.time()
        self.control, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from drivetrain._runtimes import forkserver; "
            f"forkserver.main({theirs.fileno()}, {tuple(preload)!r}, {os.getpid()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal is the driver's to handle
            )
        self.warmed = False
        self._next_token = 0

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, request: forkserver.ForkRequest, descriptors: Sequence[int]) -> int:
        """Asks for a worker, and returns the token that it is spoken of by."""
        self._next_token += 1
        forkserver.send(self.control, ("fork", self._next_token, request), descriptors)
        return self._next_token

    def warm(self, modules: Sequence[str]) -> None:
        """Has further modules imported while nobody waits for a worker; the first call counts."""
        if not self.warmed and modules:
            forkserver.send(self.control, ("warm", tuple(modules)))
        self.warmed = True

    def close(self) -> None:
        """Ends the server, and with it every worker it still has: the kernel sees to that."""
        self.control.close()
        self._process.kill()
        self._process.wait()


def _newest(modules: Sequence[str]) -> float:
    """When the latest change of these modules' files was, as Unix time in seconds; 0 if none is known.

    The way to a submodule is guessed, as finding it would import its package into the driver.
    """
    latest = 0.0
    for name in modules:
        package, *path = name.split(".")
        with contextlib.suppress(ImportError, ValueError, OSError):
            found = importlib.util.find_spec(package)
            if found is not None and found.has_location and found.origin is not None:
                file = os.path.join(os.path.dirname(found.origin), *path) + ".py" if path else found.origin
                latest = max(latest, os.stat(file).st_mtime)
    return latest


class ForkServers:
    """Keeps servers for the next groups of this process, which then start in milliseconds.

    Args:
        limit: how many to keep while no group uses them.
    """

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[_Server] = []

    def take(self, spec: GroupSpec, environment: Mapping[str, str]) -> _Server:
        """One that is kept, if it fits and lives; otherwise a new one. Those that do not fit are ended."""
        prefixes = (*_INTERPRETER_VARIABLES, *(spec.preload_environment if spec.preload else ()))
        read = frozenset((name, value) for name, value in environment.items() if name.startswith(prefixes))
        key = (tuple(spec.preload), read, tuple(sys.path))
        taken: _Server | None = None
        with self._lock:
            idle = [server for server in self._idle if server.owner == os.getpid()]  # one of a parent is not ours
            newest = _newest(spec.preload)
            fitting = [server for server in idle if server.key == key and server.alive and server.started > newest]
            if fitting:
                taken = fitting.pop()
            self._idle = fitting
        for server in idle:
            if server is not taken and server not in fitting:
                server.close()
        return taken or _Server(key, spec.preload, environment)

    def give_back(self, server: _Server) -> None:
        """Keeps a server that no group uses any more, in place of the oldest where there are enough."""
        with self._lock:
            self._idle.append(server)
            dropped = self._idle[: -self._limit]
            self._idle = self._idle[-self._limit :]
        for old in dropped:
            old.close()

    def close(self) -> None:
        """Ends those that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for server in idle:
            if server.owner == os.getpid():
                server.close()


_kept_servers = ForkServers()
atexit.register(_kept_servers.close)


@dataclass(slots=True)
class _Process:
    """A worker process.

    Attributes:
        stacks: the descriptor to read its stacks from.
        pid: its process id; 0 until the server has forked it.
        pidfd: the descriptor that can be read when it exits; None if it is not running yet, or exited at once.
    """

    stacks: int
    pid: int = 0
    pidfd: int | None = None

    def close(self) -> None:
        """Closes the descriptors."""
        os.close(self.stacks)
        if self.pidfd is not None:
            os.close(self.pidfd)


class LocalGroup(ConnectedGroup):
    """Workers forked from a server."""

    def __init__(
        self, spec: GroupSpec, server: _Server, environment: Mapping[str, str], machine_gpus: Sequence[str]
    ) -> None:
        super().__init__(time.monotonic() + spec.start_timeout_s, spec.interrupts)
        self.broken = False
        self._started = time.time()
        self._surroundings = _surroundings(spec)
        self._server = server
        self._spec = spec
        self._ranks: dict[int, int] = {}  # token -> rank
        self._processes: dict[int, _Process] = {}  # by rank
        self._outputs: list[OutputPipe] = []
        self._oom_kills = OomCounter()
        self._environment = environment
        self._gpus = partition_gpus(spec.scaling, list(machine_gpus))
        self.watch(server.control, self._hear_server)
        self._start_all(range(spec.num_workers))

    def replace(self, ranks: Sequence[int]) -> None:
        """See :meth:`drivetrain.plugin.Group.replace`."""
        self.restart_deadline(self._spec.start_timeout_s)
        # What the server still has to say of the old ones finds no rank.
        self._ranks = {token: rank for token, rank in self._ranks.items() if rank not in ranks}
        for rank in ranks:
            self.forget_rank(rank)
            self._processes.pop(rank).close()
        self._start_all(ranks)

    def _start_all(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._start(rank, self._gpus[rank], self._environment)
        while missing := [rank for rank in ranks if not self._processes[rank].pid]:
            if self.broken:
                raise WorkerDiedError("the process that workers are started from ended while importing the framework")
            self.wait(f"the processes of ranks {missing} to start", missing)
        self.workers = tuple(self._describe(rank, self._gpus[rank]) for rank in range(self._spec.num_workers))

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.plugin.Group.stacks`."""
        running = {rank: process for rank, process in self._processes.items() if process.pid and rank not in self._gone}
        return collect_stacks({rank: (running[rank].pid, running[rank].stacks) for rank in ranks if rank in running})

    def rest(self) -> bool:
        """See :meth:`drivetrain.plugin.Group.rest`."""
        for output in self._outputs:
            output.drain()
        return super().rest() and not self.broken

    def renew(self, spec: GroupSpec) -> bool:
        """See :meth:`drivetrain.plugin.Group.renew`."""
        return _surroundings(spec) == self._surroundings and super().renew(spec) and not self.broken

    def join_next_run(self, spec: GroupSpec) -> Sequence[bool]:
        """See :meth:`ConnectedGroup.join_next_run`. A shown worker writes to a pipe, and the driver to its log."""
        self._spec = spec
        for output in self._outputs:
            output.redirect(open_log(spec.output.log_directory, output.rank), spec.output.console)
        ranks = range(spec.num_workers)
        logs = [None if rank in spec.output.shown_ranks else spec.output.log_directory for rank in ranks]
        return self.join_run({rank: JoinRun(rank, logs[rank], since=self._started) for rank in ranks})

    def line_closed(self, rank: int) -> None:
        """Waits for the end of the process, which the kernel tells only after it has closed all that it had open.

        So a rank whose process dies is the cause of the errors that others have when their lines to it close.
        """
        process = self._processes[rank]
        if process.pidfd is not None:
            end = select.poll()
            end.register(process.pidfd, select.POLLIN)
            if end.poll(1000 * _DEATH_WAIT_S):
                self._note_end(rank, _exit_code_of_zombie(process.pid))

    def end(self, *, grace_s: float) -> None:
        """Ends every worker that is left, and waits until none is; closes everything."""
        self.ignore_interrupts()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close_lines)
            cleanup.callback(self._close_pipes)
            if grace_s:
                self._signal_all(signal.SIGTERM)
                self._wait_for_exits(grace_s)
            self._signal_all(signal.SIGKILL)
            self._wait_for_exits(_END_WAIT_S)
            for output in self._outputs:
                output.drain()
        if len(self._gone) < len(self._ranks):
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
            output = pipe.take_write_end()
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
            token = self._server.fork(request, (theirs.fileno(), output, stacks_write))
        except ConnectionError:
            self.broken = True
            raise WorkerDiedError("the process that workers are started from has ended") from None
        finally:
            theirs.close()
            os.close(output)
            os.close(stacks_write)
            self.add_line(rank, ours)
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
        )

    def _hear_server(self) -> None:
        received = forkserver.receive(self._server.control)
        if received is None:
            self.broken = True
            self.forget(self._server.control)
            for orphan in range(self._spec.num_workers):
                self.note_exit(orphan, None, "was killed because the fork server exited")
            return
        kind, token, value = received[0]
        rank = self._ranks.get(token)
        if rank is None:
            return  # of a group that is over
        if kind == "forked":
            self._watch_process(rank, value)
        elif kind == "exited":
            self._note_end(rank, value)

    def _watch_process(self, rank: int, pid: int) -> None:
        """Notices the end of a process by itself, as the server may be busy importing."""
        process = self._processes[rank]
        process.pid = pid
        with contextlib.suppress(ProcessLookupError):  # it has exited already, which the server reports
            process.pidfd = os.pidfd_open(pid)
            self.watch(process.pidfd, lambda: self._note_end(rank, _exit_code_of_zombie(pid)))

    def _note_end(self, rank: int, exit_code: int | None) -> None:
        if (pidfd := self._processes[rank].pidfd) is not None:
            self.forget(pidfd)
        if exit_code is not None:  # otherwise the server has taken it, and says so
            self._read_output(rank)
            self.note_exit(rank, exit_code, *self._explain_end(exit_code))

    def _explain_end(self, exit_code: int) -> tuple[str, FailureKind]:
        if exit_code == -signal.SIGKILL and self._oom_kills.rose():
            return "was killed by the kernel because memory ran out (SIGKILL)", FailureKind.OUT_OF_MEMORY
        if exit_code == -signal.SIGTERM:  # how batch systems and clouds tell a process to go
            return "", FailureKind.PREEMPTION
        return "", FailureKind.INFRASTRUCTURE

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
            if rank not in self._gone and process.pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, number)
                    if number == signal.SIGKILL:  # with whatever it has started; the server ends what is left
                        os.killpg(process.pid, number)

    def _wait_for_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._gone) < len(self._ranks) and not self.broken:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._select(self._selector, remaining)

    def _close_pipes(self) -> None:
        for process in self._processes.values():
            process.close()
        for output in self._outputs:
            output.close()


class LocalRuntime(Runtime):
    """Starts workers on this machine.

    Args:
        gpus: the GPUs that they may use, as ``CUDA_VISIBLE_DEVICES`` names them; None for all that this process may.
        servers: where the processes that workers are forked from are kept; None for those of this process.
    """

    name = "local"
    _gpus: Sequence[str] | None = None
    _servers = _kept_servers

    def __init__(self, *, gpus: Sequence[str] | None = None, servers: ForkServers | None = None) -> None:
        self._gpus = gpus
        self._servers = servers or _kept_servers

    def __reduce__(self) -> tuple[object, ...]:
        """What it was given is this process's."""
        return type(self), ()

    def _visible_gpus(self) -> list[str]:
        return visible_gpus() if self._gpus is None else list(self._gpus)

    def validate(self, scaling: ScalingConfig) -> None:
        """Refuses more GPUs than this machine has."""
        partition_gpus(replace(scaling, num_workers=scaling.min_workers), self._visible_gpus())

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """What the GPUs allow; without GPUs there is always room."""
        gpus, each = len(self._visible_gpus()), scaling.num_gpus_per_worker
        if each == 0:
            return scaling.max_workers
        return math.floor(1 / each + 1e-9) * gpus if each < 1 else gpus // int(each)

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[LocalGroup]:
        """Forks the workers; on leaving they end at once, or with a grace of seconds when the driver is interrupted."""
        environment = _environment(spec)
        server = self._servers.take(spec, environment)
        group: LocalGroup | None = None
        grace_s = 0.0
        try:
            group = LocalGroup(spec, server, environment, self._visible_gpus())
            server.warm(spec.warmup)
            yield group
        except KeyboardInterrupt:
            grace_s = _GRACE_S
            raise
        finally:
            self._end(group, server, grace_s)

    def _end(self, group: LocalGroup | None, server: _Server, grace_s: float) -> None:
        done: Callable[[], None] = server.close
        try:
            if group is not None:
                group.end(grace_s=grace_s)
                if not group.broken:
                    done = lambda: self._servers.give_back(server)  # noqa: E731
        finally:
            done()


def _environment(spec: GroupSpec) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads_per_worker(spec.scaling)), **os.environ}


def _surroundings(spec: GroupSpec) -> object:
    """What a worker process has from the driver, and from the run, from its first moment on."""
    asked = spec.num_workers, spec.scaling, spec.output.shown_ranks, tuple(spec.preload)
    return *asked, _environment(spec), os.getcwd(), tuple(sys.path)


def _exit_code_of_zombie(pid: int) -> int | None:
    """How a process has ended that its parent has not asked about yet; None if it has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, wait_status = fields[0], int(fields[-1])
    return os.waitstatus_to_exitcode(wait_status) if state == b"Z" else None
