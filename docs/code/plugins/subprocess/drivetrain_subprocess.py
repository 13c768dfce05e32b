"""A runtime that starts each worker as a process: `python -m drivetrain_subprocess`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from drivetrain import ConfigurationError, ScalingConfig, WorkerDiedError
from drivetrain.plugin import Runtime, WorkerInfo
from drivetrain.plugin.runtimes import (
    DriverAddress,
    Group,
    GroupSpec,
    Introduction,
    RemoteGroup,
    WorkerListener,
    worker_main,
)


class SubprocessRuntime(Runtime):
    """Starts workers on this machine."""

    name = "subprocess"

    def validate(self, scaling: ScalingConfig) -> None:
        """Check the configuration before anything is started."""
        if scaling.use_gpu:
            raise ConfigurationError(
                "the runtime 'subprocess': expected use_gpu=False, got True"
            )

    def room(
        self,
        scaling: ScalingConfig,
        running: Sequence[WorkerInfo],
        avoided: frozenset[str],
    ) -> int:
        """Return the number of workers for which there is room, for elastic runs."""
        return scaling.max_workers

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Group]:
        """Start the workers of an attempt. Leaving the context ends all of them."""
        with contextlib.ExitStack() as acquired:
            listener = WorkerListener("127.0.0.1", expected=spec.num_workers)
            acquired.callback(listener.close)
            group = SubprocessGroup(spec, listener)
            acquired.callback(group.close_connections)
            acquired.callback(group.end)
            group.start()
            yield group


class SubprocessGroup(RemoteGroup):
    """The workers of an attempt, as the driver sees them."""

    def __init__(self, spec: GroupSpec, listener: WorkerListener) -> None:
        super().__init__(spec, deadline=time.monotonic() + spec.start_timeout_s)
        self._listener = listener
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connected: dict[int, Introduction] = {}
        self.watch(listener.fileno(), self._accept)

    def start(self) -> None:
        """Start the processes, wait until they have connected, and give them ranks."""
        for index in range(self.spec.num_workers):
            self._start_process(index)
        while missing := [
            index
            for index in range(len(self._processes))
            if index not in self._connected
        ]:
            for index in missing:
                if (code := self._processes[index].poll()) is not None:
                    raise WorkerDiedError(
                        f"worker process {index} did not start: exit code {code}"
                    )
            self.wait(f"worker processes {missing} to connect", ())
        processes = list(self._connected.values())
        no_gpus: dict[int, tuple[str, ...]] = {
            process.index: () for process in processes
        }
        self.assign_ranks(processes, no_gpus, first_node=socket.gethostname())
        self.set_up(range(len(processes)), {})

    def end(self) -> None:
        """Let idle processes exit, and kill the others, even if `start` has failed."""
        self.ignore_interrupts()
        if self.let_exit():
            self.wait_for_closed_connections(15.0)
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def connection_closed(self, rank: int) -> None:
        """Report the exit code of a process that has closed its connection."""
        index = next(index for index, owner in self.rank_of.items() if owner == rank)
        self.note_exit(rank, self._processes[index].wait(10.0))

    def _start_process(self, index: int) -> None:
        address = self._listener.address
        arguments = [
            address.host,
            address.port,
            address.token.hex(),
            index,
            list(self.spec.preload),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain_subprocess"],
            stdin=subprocess.PIPE,  # unlike a command line, other users cannot read it
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                **self.spec.environment,
            },
            start_new_session=True,  # Ctrl-C in the terminal reaches only the driver
        )
        self._processes.append(process)
        exited = os.pidfd_open(process.pid)
        self.watch(
            exited, partial(self._on_exit, exited)
        )  # a process may exit before it connects
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited already
            process.stdin.write(json.dumps(arguments).encode() + b"\n")
            process.stdin.flush()

    def _on_exit(self, descriptor: int) -> None:
        self.forget(descriptor)
        os.close(descriptor)

    def _accept(self) -> None:
        if (introduction := self._listener.accept()) is not None:
            self._connected[introduction.index] = introduction


def _run_worker() -> None:
    """Run a worker process. Its arguments arrive on the standard input."""
    host, port, token, index, preload = json.loads(sys.stdin.readline())
    with open(os.devnull) as nothing:  # the train function cannot read from the driver
        os.dup2(nothing.fileno(), 0)
    worker_main(DriverAddress(host, port, bytes.fromhex(token)), index, preload=preload)


if __name__ == "__main__":
    _run_worker()
