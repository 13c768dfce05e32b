"""A runtime for this machine that starts each worker with a command: ``python -m acme_processes.worker``."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from drivetrain import ResourceError, ScalingConfig, WorkerDiedError
from drivetrain.plugin import Runtime, WorkerInfo
from drivetrain.plugin.runtimes import GroupSpec, Introduction, RemoteGroup, WorkerListener, read_stacks

__all__ = ["ProcessRuntime"]

COMMAND = [sys.executable, "-m", "acme_processes.worker"]


class ProcessGroup(RemoteGroup):
    """A process's index is the number of processes that were started before it."""

    def __init__(self, spec: GroupSpec, listener: WorkerListener) -> None:
        super().__init__(spec, time.monotonic() + spec.start_timeout_s)
        self._listener = listener
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []
        self._introductions: dict[int, Introduction] = {}
        self.watch(listener.fileno(), self._accept)

    def start(self) -> None:
        indices = [self._start_process() for _ in range(self.spec.num_workers)]
        processes = self._await_introductions(indices)
        self.assign_ranks(processes, dict.fromkeys(indices, ()), first_node=socket.gethostname())
        self.set_up(range(len(indices)), {})

    def replace(self, ranks: Sequence[int]) -> None:
        self.restart_deadline(self.spec.start_timeout_s)
        for rank in ranks:
            self.forget_rank(rank)
            del self.rank_of[self._index_of(rank)]
        processes = self._await_introductions([self._start_process() for _ in ranks])
        for rank, process in zip(ranks, processes, strict=True):
            self.take_over(rank, process)
        self.set_up(ranks, {})

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: text for node in self.stack_targets(ranks).values() for rank, text in read_stacks(node).items()}

    def reuse(self, spec: GroupSpec) -> bool:
        return False  # every run starts its own processes

    def connection_closed(self, rank: int) -> None:
        # Wait for the exit, so that it is recorded before other ranks report a lost connection to this one.
        index = self._index_of(rank)
        if select.select([self._pidfds[index]], [], [], 2.0)[0]:
            self._on_exit(index)

    def end(self) -> None:
        self.ignore_interrupts()
        if self.let_exit():
            self.wait_for_closed_connections(15.0)
        for index, process in enumerate(self._processes):
            self._kill(index)
            os.close(self._pidfds[index])
            if process.stdin is not None:
                process.stdin.close()

    def _start_process(self) -> int:
        index, address = len(self._processes), self._listener.address
        environment = {**os.environ, **self.spec.environment}
        # A session of its own, so that Ctrl-C in the terminal reaches only the driver.
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        self._processes.append(process)
        self._pidfds.append(os.pidfd_open(process.pid))
        self.watch(self._pidfds[index], partial(self._on_exit, index))
        message = [address.host, address.port, address.token.hex(), index, list(self.spec.preload)]
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited, which is noticed later
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        return index

    def _accept(self) -> None:
        if (introduction := self._listener.accept()) is not None:
            self._introductions[introduction.index] = introduction

    def _await_introductions(self, indices: Sequence[int]) -> list[Introduction]:
        while missing := [index for index in indices if index not in self._introductions]:
            for index in missing:
                if (code := self._processes[index].returncode) is not None:
                    raise WorkerDiedError(f"worker process {index} did not start: exit code {code}", exit_code=code)
            self.wait(f"worker processes {missing} to connect", ())
        return [self._introductions[index] for index in indices]

    def _index_of(self, rank: int) -> int:
        return next(index for index, own in self.rank_of.items() if own == rank)

    def _on_exit(self, index: int) -> None:
        self.forget(self._pidfds[index])
        self._kill(index)
        if index in self.rank_of:
            self.note_exit(self.rank_of[index], self._processes[index].returncode)

    def _kill(self, index: int) -> None:
        """Kill the processes that a worker has started too. Its number is not reused until ``wait()`` returns."""
        process = self._processes[index]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class ProcessRuntime(Runtime):
    name = "acme_processes"

    def validate(self, scaling: ScalingConfig) -> None:
        if scaling.num_gpus_per_worker:
            raise ResourceError("runtime 'acme_processes': expected workers without GPUs. Set use_gpu=False")

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return scaling.max_workers

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[ProcessGroup]:
        with contextlib.closing(WorkerListener("127.0.0.1")) as listener, contextlib.ExitStack() as acquired:
            group = ProcessGroup(spec, listener)
            acquired.callback(group.close_connections)
            acquired.callback(group.end)
            group.start()
            yield group
