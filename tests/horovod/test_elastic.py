"""Horovod's elastic mode: what a reset keeps, and what a lost process costs."""

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

ELASTIC = HorovodConfig(elastic=True, timeout_s=30)


def train_elastically(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Commits every second step; on rank 1 something happens before the sixth, the first time."""
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
    went_back_to: list[int] = []
    rank = drivetrain.get_context().get_world_rank()
    new = checkpoint is not None
    state.register_reset_callbacks([lambda: went_back_to.append(state.step)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if (rank, state.step) == (config.get("victim", 1), 5) and not went_back_to and not new:
                config["incident"]()
            train_step(model, optimizer, make_batch(state.step, hvd.rank()))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
                save(state)

    train(state)
    return model.state_dict(), went_back_to


def save(state: Any) -> None:
    with TemporaryDirectory() as directory:
        if hvd.rank() == 0:
            parts = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
            torch.save(parts, Path(directory, "state.pt"))
        metrics = {"step": state.step, "pid": os.getpid()}
        drivetrain.report(metrics, Checkpoint.from_directory(directory) if hvd.rank() == 0 else None)


def lose_the_connection() -> None:
    raise hvd.HorovodInternalError("the connection is lost, in this test")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_failed_collective_takes_all_ranks_back_to_the_commit_in_their_processes(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    told = Collector()
    parameters, went_back_to = fit(train_elastically, {"incident": lose_the_connection}, callbacks=(told,)).return_value
    assert_same(parameters, alone)
    assert went_back_to == [4]
    assert told.attempts == 1
    assert [metrics["step"] for metrics in told.metrics_of(1)] == [2, 4, 6]
    assert len({metrics["pid"] for metrics in told.metrics_of(1)}) == 1


def test_lost_process_takes_new_ones_back_to_the_checkpoint_of_the_commit(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    told = Collector()
    parameters, _ = fit(train_elastically, {"incident": die}, max_failures=1, callbacks=(told,)).return_value
    assert_same(parameters, alone)
    assert told.attempts == 2
    assert [failure.rank for failure in told.failures] == [1]
    assert [metrics["step"] for metrics in told.metrics_of(1)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("victim", "runtime"), [(1, "local"), (0, "local"), pytest.param(1, "ray", marks=pytest.mark.ray)]
)
def test_ranks_that_are_left_stay_and_a_new_one_joins_them(
    fit: Callable[..., Result],
    alone: dict[str, torch.Tensor],
    victim: int,
    runtime: str,
    request: pytest.FixtureRequest,
):
    if runtime == "ray":
        request.getfixturevalue("ray_address")
    told = Collector()
    config = {"incident": die, "victim": victim}
    result = fit(train_elastically, config, runtime=runtime, horovod=ELASTIC, max_failures=1, callbacks=(told,))
    assert_same(result.return_value[0], alone)
    assert told.attempts == 1
    assert [(failure.rank, failure.kind) for failure in told.failures] == [(victim, FailureKind.INFRASTRUCTURE)]
    stayed, replaced = told.metrics_of(1 - victim), told.metrics_of(victim)
    assert [metrics["step"] for metrics in stayed] == [metrics["step"] for metrics in replaced] == [2, 4, 6]
    assert len({metrics["pid"] for metrics in stayed}) == 1
    assert len({metrics["pid"] for metrics in replaced}) == 2


def test_all_are_replaced_where_the_train_function_is_not_elastic(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    told = Collector()
    result = fit(train_with_checkpoints, {"die_at": 4}, horovod=ELASTIC, max_failures=1, callbacks=(told,))
    assert_same(result.return_value, alone)
    assert told.attempts == 2
    assert [failure.rank for failure in told.failures] == [1]


def test_failed_collective_of_an_elastic_run_costs_no_process(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    told = Collector()
    result = fit(train_elastically, {"incident": lose_the_connection}, horovod=ELASTIC, callbacks=(told,))
    assert_same(result.return_value[0], alone)
    assert told.attempts == 1
    assert not told.failures
