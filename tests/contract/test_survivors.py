"""With a backend that supports it, the surviving ranks keep running when one is lost, and a new process joins them."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import Checkpoint, FailureConfig, FailureKind, TrainContext, TrainingFailedError
from drivetrain.plugin import Backend
from drivetrain.plugin.backends import WorkerGroup
from drivetrain.runs import RunReader
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import same_on_ray, with_processes
from tests.support import Collector, local_storage, open_pipe, release, wait_for_release


@dataclass(frozen=True)
class KeepsSurvivors(Backend):
    """Ranks wait for each other at named pipes; ``on_rejoin`` is released when the controller has a new process."""

    waits: bool = True
    on_rejoin: str = ""

    name = "staying"
    survives_losses = True

    def rejoin(self, group: WorkerGroup, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        future: Future[Sequence[Mapping[str, str]]] = Future()
        if self.on_rejoin:
            release(self.on_rejoin)
        if self.waits:
            future.set_result([{"NEW_IN_PLACE_OF": str(rank)} for rank in lost])
        return future

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        os.environ.update(rendezvous)
        yield


def train(config: dict[str, str]) -> int:
    """Rank 0 reports three times, rank 1 once before it dies; then both report together, rank 1 in a new process."""
    rank = drivetrain.get_context().get_world_rank()
    if "NEW_IN_PLACE_OF" in os.environ:
        release(config["new"])
    elif rank == 0:
        for step in range(3):
            drivetrain.report({"step": step, "pid": os.getpid()})
        release(config["reported"])
        wait_for_release(config["new"])
    else:
        drivetrain.report({"step": 0, "pid": os.getpid()})
        wait_for_release(config["reported"])
        os.kill(os.getpid(), signal.SIGKILL)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{rank}.txt").write_text("here")
        checkpoint = Checkpoint.from_directory(directory)
        drivetrain.report({"step": 3, "ranks": 1, "pid": os.getpid()}, checkpoint, reduce={"ranks": "sum"})
    return os.getpid()


def raise_on_rank_0(config: dict[str, str]) -> int:
    """Rank 1 dies, and rank 0 does not wait for its replacement."""
    context = drivetrain.get_context()
    if context.attempt > 0:
        return context.attempt
    if context.get_world_rank() == 1 and "NEW_IN_PLACE_OF" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_release(config["new"])
    raise ConnectionError("rank 1 was lost")


@with_processes
def test_survivors_keep_running_and_all_ranks_report_together_again(runtime: RuntimeUnderTest, tmp_path: Path):
    collector = Collector()
    with open_pipe(tmp_path / "reported") as reported, open_pipe(tmp_path / "new") as new:
        result = runtime.fit(
            train,
            {"reported": reported.path, "new": new.path},
            backend_config=KeepsSurvivors(),
            callbacks=[collector],
            failure_config=FailureConfig(max_failures=1),
        )
    assert [(failure.rank, failure.kind) for failure in collector.failures] == [(1, FailureKind.INFRASTRUCTURE)]
    assert collector.failures[0].survived
    assert collector.attempts == 1
    (attempt,) = RunReader(local_storage(Path(result.path))).record().history.attempts
    assert attempt.failure is None
    assert [failure["rank"] for failure in attempt.survived] == [1]
    assert {metrics["pid"] for metrics in collector.metrics_of(0)} == {result.return_value}
    assert len({metrics["pid"] for metrics in collector.metrics_of(1)}) == 2
    assert result.metrics["ranks"] == 2, "the reports after the replacement were not combined over both ranks"
    with result.checkpoint.as_directory() as directory:
        assert {"rank_0.txt", "rank_1.txt"} <= set(os.listdir(directory))
    assert collector.checkpoints == ["checkpoint_000005"], "number 4 must stay unused"
    assert [metrics["_training_iteration"] for metrics in collector.metrics_of(0)] == [1, 2, 3, 4]
    assert collector.metrics_of(1)[-1]["_training_iteration"] == 4


def die_while_storing(config: dict[str, str]) -> None:
    """Rank 1 stores a file of its second checkpoint, and dies before reporting it; its replacement stores another."""
    rank = drivetrain.get_context().get_world_rank()
    is_new = "NEW_IN_PLACE_OF" in os.environ

    def store_and_die(checkpoint: Checkpoint, name: str) -> Checkpoint:
        directory = Path(drivetrain.get_context().get_run_dir(), name)
        directory.mkdir(exist_ok=True)
        (directory / "lost.txt").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
        return checkpoint

    for step in range(1, 4):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank_{rank}.txt").write_text(str(step))
            checkpoint = Checkpoint.from_directory(directory)
            if rank == 1 and step == 2 and not is_new:
                wait_for_release(config["reported"])
                drivetrain.report({"step": step}, checkpoint, checkpoint_upload_fn=store_and_die)
            drivetrain.report({"step": step}, checkpoint)
        if is_new and step == 1:
            release(config["new"])
        elif rank == 0 and step == 1:
            release(config["reported"])
            wait_for_release(config["new"])


@with_processes
@same_on_ray
def test_files_stored_by_a_rank_that_died_before_reporting_are_in_no_checkpoint(
    runtime: RuntimeUnderTest, tmp_path: Path
):
    collector = Collector()
    with open_pipe(tmp_path / "reported") as reported, open_pipe(tmp_path / "new") as new:
        result = runtime.fit(
            die_while_storing,
            {"reported": reported.path, "new": new.path},
            backend_config=KeepsSurvivors(),
            callbacks=[collector],
            failure_config=FailureConfig(max_failures=1),
        )
    assert [failure.rank for failure in collector.failures] == [1]
    for checkpoint, _ in result.best_checkpoints:
        with checkpoint.as_directory() as directory:
            assert "lost.txt" not in os.listdir(directory)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert Path(directory, "rank_1.txt").read_text() == "3"


@with_processes
@same_on_ray
def test_all_ranks_are_replaced_if_another_rank_does_not_wait(runtime: RuntimeUnderTest, tmp_path: Path):
    collector = Collector()
    with open_pipe(tmp_path / "new") as new:
        result = runtime.fit(
            raise_on_rank_0,
            {"new": new.path},
            backend_config=KeepsSurvivors(waits=False, on_rejoin=new.path),
            callbacks=[collector],
            failure_config=FailureConfig(max_failures=1),
        )
    assert result.return_value == 1
    assert collector.attempts == 2
    assert [failure.rank for failure in collector.failures] == [1]


@with_processes
def test_no_rank_is_replaced_beyond_the_failure_budget(runtime: RuntimeUnderTest, tmp_path: Path):
    config: dict[str, Any] = {"reported": str(tmp_path / "reported"), "new": str(tmp_path / "new")}
    with (
        open_pipe(tmp_path / "reported"),
        open_pipe(tmp_path / "new"),
        pytest.raises(TrainingFailedError, match="rank 1: the worker process") as caught,
    ):
        runtime.fit(train, config, backend_config=KeepsSurvivors())
    assert caught.value.rank == 1
