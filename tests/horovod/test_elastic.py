"""Horovod's elastic mode: recovery from failed collectives and lost processes."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import drivetrain
from drivetrain import Checkpoint, FailureKind, Result
from drivetrain_horovod import HorovodConfig
from tests.horovod.test_training import (
    STEPS,
    alone,
    assert_same,
    distribute,
    make_batch,
    make_model,
    make_optimizer,
    train_step,
    train_with_checkpoints,
)
from tests.support import Collector

__all__ = ["alone"]  # a fixture

ELASTIC = HorovodConfig(elastic=True, timeout_s=90)

SHUTDOWNS = 10


def train_elastically(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Train with a commit every second step. Before the sixth step, the incident happens once on the victim's rank."""
    hvd.init()
    model = make_model()
    optimizer = distribute(model, make_optimizer(model))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            kept = torch.load(Path(directory, "state.pt"), weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        state.step = kept["step"]
        state.save()
    restored_steps: list[int] = []
    rank = drivetrain.get_context().get_world_rank()
    is_restart = checkpoint is not None
    state.register_reset_callbacks([lambda: restored_steps.append(state.step)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if (rank, state.step) == (config.get("victim", 1), 5) and not restored_steps and not is_restart:
                config["incident"]()
            train_step(model, optimizer, make_batch(state.step, hvd.rank()))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
                save(state)

    train(state)
    return model.state_dict(), restored_steps


def save(state: Any) -> None:
    with TemporaryDirectory() as directory:
        if hvd.rank() == 0:
            parts = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
            torch.save(parts, Path(directory, "state.pt"))
        metrics = {"step": state.step, "pid": os.getpid()}
        drivetrain.report(metrics, Checkpoint.from_directory(directory) if hvd.rank() == 0 else None)


def lose_the_connection() -> None:
    raise hvd.HorovodInternalError("connection lost by this test")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_failed_collective_restores_the_commit_on_all_ranks_without_new_processes(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    collector = Collector()
    parameters, restored_steps = fit(
        train_elastically, {"incident": lose_the_connection}, callbacks=(collector,)
    ).return_value
    assert_same(parameters, alone)
    assert restored_steps == [4]
    assert collector.attempts == 1
    assert [metrics["step"] for metrics in collector.metrics_of(1)] == [2, 4, 6]
    assert len({metrics["pid"] for metrics in collector.metrics_of(1)}) == 1


def test_lost_process_causes_a_restart_from_the_checkpoint_of_the_commit(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    collector = Collector()
    parameters, _ = fit(train_elastically, {"incident": die}, max_failures=1, callbacks=(collector,)).return_value
    assert_same(parameters, alone)
    assert collector.attempts == 2
    assert [failure.rank for failure in collector.failures] == [1]
    assert [metrics["step"] for metrics in collector.metrics_of(1)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("victim", "runtime"), [(1, "local"), (0, "local"), pytest.param(1, "ray", marks=pytest.mark.ray)]
)
def test_surviving_ranks_keep_their_processes_and_a_new_one_joins_them(
    fit: Callable[..., Result],
    alone: dict[str, torch.Tensor],
    victim: int,
    runtime: str,
    request: pytest.FixtureRequest,
):
    if runtime == "ray":
        request.getfixturevalue("ray_address")
    collector = Collector()
    config = {"incident": die, "victim": victim}
    result = fit(train_elastically, config, runtime=runtime, horovod=ELASTIC, max_failures=1, callbacks=(collector,))
    assert_same(result.return_value[0], alone)
    assert collector.attempts == 1
    assert [(failure.rank, failure.kind) for failure in collector.failures] == [(victim, FailureKind.INFRASTRUCTURE)]
    survivor, replaced = collector.metrics_of(1 - victim), collector.metrics_of(victim)
    assert [metrics["step"] for metrics in survivor] == [metrics["step"] for metrics in replaced] == [2, 4, 6]
    assert len({metrics["pid"] for metrics in survivor}) == 1
    assert len({metrics["pid"] for metrics in replaced}) == 2


def test_all_processes_are_replaced_if_the_train_function_is_not_elastic(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    collector = Collector()
    result = fit(train_with_checkpoints, {"die_at": 4}, horovod=ELASTIC, max_failures=1, callbacks=(collector,))
    assert_same(result.return_value, alone)
    assert collector.attempts == 2
    assert [failure.rank for failure in collector.failures] == [1]


def test_failed_collective_of_an_elastic_run_replaces_no_process(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    collector = Collector()
    result = fit(train_elastically, {"incident": lose_the_connection}, horovod=ELASTIC, callbacks=(collector,))
    assert_same(result.return_value[0], alone)
    assert collector.attempts == 1
    assert not collector.failures


def start_operations_during_shutdowns() -> int:
    """Repeatedly start operations on rank 0 until rank 1 shuts Horovod down. Wait for the end of the last operation.

    Horovod 0.28.1 without our patches hangs here after a few shutdowns.
    """
    hvd.init()
    shutdowns = 0

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal shutdowns
        if shutdowns == SHUTDOWNS:
            return
        shutdowns += 1
        if hvd.rank() == 1:
            hvd.allreduce(torch.zeros(1), name="0")  # wait until rank 0 starts operations
            lose_the_connection()
        try:
            for number in itertools.count():
                operation = hvd.allreduce_async(torch.zeros(1), name=str(number))
        except hvd.HorovodInternalError:
            hvd.synchronize(operation)
            raise

    train(hvd.elastic.TorchState())
    return shutdowns


def test_operation_that_starts_during_a_shutdown_ends(fit: Callable[..., Result]):
    assert fit(start_operations_during_shutdowns, horovod=ELASTIC).return_value == SHUTDOWNS
