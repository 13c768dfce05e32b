"""Horovod's elastic mode: what a reset keeps, and what a lost process costs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import horovod.torch as hvd
import torch

import drivetrain
from drivetrain import Checkpoint, Result
from tests.horovod.test_training import (
    STEPS,
    alone,
    assert_same,
    distribute,
    make_batch,
    make_model,
    make_optimizer,
    train_step,
)
from tests.support import Collector

__all__ = ["alone"]  # a fixture


def train_elastically(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Commits every second step; on rank 1 something happens before the sixth, the first time."""
    hvd.init()
    model = make_model()
    optimizer = distribute(model, make_optimizer(model))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    if checkpoint := drivetrain.get_checkpoint():
        with checkpoint.as_directory() as directory:
            kept = torch.load(Path(directory, "state.pt"), weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        state.step = kept["step"]
        state.save()
    went_back_to: list[int] = []
    state.register_reset_callbacks([lambda: went_back_to.append(state.step)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if (hvd.rank(), state.step) == (1, 5) and not went_back_to and drivetrain.get_context().attempt == 0:
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
