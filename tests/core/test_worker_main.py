"""A runtime that only starts processes which call `worker_main`, written with public names only."""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError, WorkerDiedError
from drivetrain.plugin import Runtime, WorkerInfo
from drivetrain.plugin.runtimes import DriverAddress, GroupSpec, Introduction, RemoteGroup, WorkerListener
from drivetrain_testing import RuntimeCapability, RuntimeConformance

WORKER = """
import os, sys
from drivetrain.plugin.runtimes import DriverAddress, worker_main
token = bytes.fromhex(os.environ.pop("WORKER_TOKEN"))
worker_main(DriverAddress(sys.argv[1], int(sys.argv[2]), token), int(sys.argv[3]), details=sys.argv[1:])
"""


class MinimalGroup(RemoteGroup):
    def __init__(self, spec: GroupSpec, listener: WorkerListener) -> None:
        super().__init__(spec, time.monotonic() + spec.start_timeout_s)
        self.listener = listener
        self.introductions: dict[int, Introduction] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.watch(self.listener.fileno(), self.accept)
        address = self.listener.address
        for index in range(self.spec.num_workers):
            command = [sys.executable, "-c", WORKER, address.host, str(address.port), str(index)]
            environment = {**os.environ, **self.spec.environment, "WORKER_TOKEN": address.token.hex()}
            self.processes.append(subprocess.Popen(command, env=environment))
        while missing := set(range(self.spec.num_workers)) - self.introductions.keys():
            self.wait(f"the processes {sorted(missing)} to connect", ())
        introductions = [self.introductions[index] for index in range(self.spec.num_workers)]
        gpus = dict.fromkeys(self.introductions, ())
        self.assign_ranks(introductions, gpus, first_node=socket.gethostname())
        self.set_up(range(self.spec.num_workers), {})

    def accept(self) -> None:
        introduction = self.listener.accept()
        if introduction is not None:
            self.introductions[introduction.index] = introduction

    def connection_closed(self, rank: int) -> None:
        index = next(index for index, own in self.rank_of.items() if own == rank)
        self.note_exit(rank, self.processes[index].wait(10))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class MinimalRuntime(Runtime):
    name = "minimal"

    def validate(self, scaling: ScalingConfig) -> None:
        pass

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return scaling.max_workers

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[MinimalGroup]:
        with contextlib.ExitStack() as acquired:
            listener = WorkerListener("127.0.0.1")
            acquired.callback(listener.close)
            group = MinimalGroup(spec, listener)
            acquired.callback(group.close_connections)
            acquired.callback(group.end)
            group.start()
            yield group


class TestMinimalRuntime(RuntimeConformance):
    runtime = MinimalRuntime
    capabilities = frozenset(
        {
            RuntimeCapability.PROCESSES,
            RuntimeCapability.EXIT_CODES,
            RuntimeCapability.OUTPUT,
            RuntimeCapability.ELASTIC,
            RuntimeCapability.ENDS_WITH_DRIVER,
        }
    )


def report_place() -> str:
    context = drivetrain.get_context()
    print("printed by rank", context.get_world_rank())
    drivetrain.report({"rank": context.get_world_rank()}, reduce={"rank": "sum"})
    return f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']} on {context.worker.node_id}"


def fit(function: object, directory: Path) -> drivetrain.Result:
    scaling = ScalingConfig(num_workers=2, runtime=MinimalRuntime())
    run = RunConfig(name="run", storage_path=str(directory), verbose=0)
    return DataParallelTrainer(function, scaling_config=scaling, run_config=run).fit()


def test_runtime_only_needs_processes_that_call_worker_main(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = fit(report_place, tmp_path)

    assert result.metrics["rank"] == 1
    assert result.return_value == f"0/2 on {socket.gethostname()}"
    for rank in range(2):
        assert (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text() == f"printed by rank {rank}\n"
    assert "[rank 0] printed by rank 0" in capfd.readouterr().out


def kill_rank_1() -> None:
    if drivetrain.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_exit_code_of_a_process_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match="was killed by SIGKILL") as caught:
        fit(kill_rank_1, tmp_path)

    assert isinstance(caught.value.__cause__, WorkerDiedError)
    assert caught.value.__cause__.rank == 1


class Poison:
    """An object that writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_connection_with_a_wrong_token_is_closed_before_anything_is_unpickled(tmp_path: Path) -> None:
    listener = WorkerListener("127.0.0.1")
    address = listener.address
    with contextlib.closing(listener), socket.create_connection((address.host, address.port)) as connection:
        body = pickle.dumps(Poison(tmp_path / "unpickled"))
        connection.sendall(bytes(len(address.token)) + len(body).to_bytes(8, "big") + body)

        select.select([listener], [], [], 10)
        assert listener.accept() is None
        connection.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # unread bytes reset the connection
            while connection.recv(100):  # the greeting
                pass
    assert not (tmp_path / "unpickled").exists()


def test_token_is_not_shown() -> None:
    assert "secret" not in repr(DriverAddress("127.0.0.1", 1, b"secret"))
