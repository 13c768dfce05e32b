"""A start that takes too long fails, and the error names the state of every rank."""

import contextlib
import gc
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from drivetrain import (
    DataParallelTrainer,
    FailureKind,
    RunConfig,
    ScalingConfig,
    TrainContext,
    TrainingFailedError,
    WaitTimeoutError,
)
from drivetrain._runtimes.local import LocalRuntime
from drivetrain._runtimes.servers import ForkServers
from drivetrain.plugin import Backend
from drivetrain.plugin.backends import WorkerGroup
from tests.support import Pipe, open_pipe, send_line, wait_for_release, wait_until_exited

START_TIMEOUT_S = 10.0  # a busy machine needs seconds to start the workers


def wait_for_the_others(gate: str) -> None:
    """Block like a collective that one rank never joins."""
    wait_for_release(gate)


class BlocksInSession(Backend):
    name = "the collective"

    def __init__(self, gate: str, pids: str) -> None:
        self.gate = gate
        self.pids = pids

    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
        import os

        send_line(self.pids, os.getpid())
        if context.get_world_rank() == 1:
            wait_for_the_others(self.gate)
        return contextlib.nullcontext()


class BlocksInRendezvous(BlocksInSession):
    def rendezvous(self, group: WorkerGroup) -> list[dict[str, str]]:
        group.run(wait_for_the_others, self.gate, ranks=[1])
        return [{}, {}]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Pipe]:
    with open_pipe(tmp_path / "gate") as pipe:
        yield pipe


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Pipe]:
    with open_pipe(tmp_path / "pids") as pipe:
        yield pipe


def fit(backend: Backend, tmp_path: Path, function: Callable[..., object] = lambda: None) -> None:
    DataParallelTrainer(
        function,
        backend_config=backend,
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, start_timeout_s=START_TIMEOUT_S),
    ).fit()


def test_rank_that_hangs_in_its_setup_is_named_with_its_phase_and_stack(tmp_path: Path, gate: Pipe, pids: Pipe) -> None:
    started = time.monotonic()
    with pytest.raises(TrainingFailedError) as failed:
        fit(BlocksInSession(gate.path, pids.path), tmp_path)

    assert time.monotonic() - started < 60
    cause = failed.value.__cause__
    assert isinstance(cause, WaitTimeoutError)
    assert cause.ranks == (1,)
    assert failed.value.kind is FailureKind.HANG
    assert "start_timeout_s" in str(failed.value)
    assert re.search(r"rank 1 \(process \d+ on .*\) is setting up the collective, has not reported yet", str(cause))
    assert "wait_for_the_others" in str(cause), "the stack is missing"
    assert "rank 0 is" not in str(cause)
    wait_until_exited(pids.receive_pids(2))


def test_rank_that_hangs_in_the_rendezvous_is_named_with_its_stack(tmp_path: Path, gate: Pipe, pids: Pipe) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        fit(BlocksInRendezvous(gate.path, pids.path), tmp_path)

    cause = failed.value.__cause__
    assert isinstance(cause, WaitTimeoutError)
    assert cause.ranks == (1,)
    assert "ranks [1] to run wait_for_the_others" in str(cause)
    assert str(cause).count("wait_for_the_others") > 1, "the stack is missing"
    assert failed.value.kind is FailureKind.HANG


def test_train_function_itself_may_take_longer_than_the_start(tmp_path: Path, gate: Pipe, pids: Pipe) -> None:
    class NeverBlocks(BlocksInSession):
        def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
            return contextlib.nullcontext()

    def train() -> None:
        import threading

        assert not threading.Event().wait(START_TIMEOUT_S + 0.5)

    fit(NeverBlocks(gate.path, pids.path), tmp_path, train)


def test_start_that_times_out_before_the_workers_exist_closes_its_connections(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=2, runtime=LocalRuntime(servers=ForkServers())),
        run_config=RunConfig(start_timeout_s=0.001, storage_path=tmp_path),
    )
    with pytest.raises(TrainingFailedError, match="start_timeout_s"):
        trainer.fit()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []
