"""Runs that are killed, and resume with the same rows and random numbers as without the kill."""

import os
import signal
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Result
from drivetrain_lightning import RayDDPStrategy, RayTrainReportCallback
from tests.lightning.jobs import make_trainer
from tests.noisy import (
    ROWS,
    STEPS,
    NoisyNetwork,
    NoisyRows,
    batch_size,
    gathered,
    numbers_of,
    parameters_of,
    seed_each_rank,
)
from tests.support import Collector


class Noisy(pl.LightningModule):
    """Remembers the rows of each step, and kills the last rank before a step in the first attempt."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__()
        self.network = NoisyNetwork()
        self.kill_at = kill_at
        self.rows: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        context = drivetrain.get_context()
        is_last = context.get_world_rank() == context.get_world_size() - 1
        if self.global_step == self.kill_at and context.attempt == 0 and is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.rows.append(numbers_of(batch))
        return self.network(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(config: dict[str, Any]) -> tuple[list[list[float]], list[list[int]]]:
    """Train, and return the parameters, and the rows of each step of this attempt."""
    module = Noisy(config.get("kill_at"))
    seed_each_rank()
    trainer = make_trainer(
        max_epochs=3,
        strategy=RayDDPStrategy(find_unused_parameters=True),  # for the same sums on three workers
        callbacks=[RayTrainReportCallback(every=config["every"])],
    )
    generator = torch.Generator().manual_seed(7) if config.get("generator") else None
    processes = config.get("processes", 0)
    loader = DataLoader(NoisyRows(), batch_size(), shuffle=True, num_workers=processes, generator=generator)
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        trainer.fit(module, loader)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(module, loader, ckpt_path=Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    return parameters_of(module), gathered(module.rows)


@pytest.mark.parametrize(
    ("workers", "config", "kill_at"),
    [
        pytest.param(2, {"every": 2}, STEPS + 3, id="within an epoch"),
        pytest.param(2, {"every": 2, "processes": 2}, STEPS + 3, id="within an epoch, with loader processes"),
        pytest.param(1, {"every": 2, "processes": 1}, STEPS + 3, id="within an epoch of a single worker"),
        pytest.param(2, {"every": "epoch", "processes": 2}, STEPS + 3, id="after an epoch, with loader processes"),
        pytest.param(
            1, {"every": "epoch", "generator": True, "processes": 1}, STEPS + 3, id="after an epoch, own generator"
        ),
    ],
)
def test_killed_run_ends_with_the_parameters_of_an_undisturbed_one(
    fit: Callable[..., Result], workers: int, config: dict[str, Any], kill_at: int
):
    parameters, rows = fit(train, config, workers=workers).return_value
    collector = Collector()
    killed = fit(train, {**config, "kill_at": kill_at}, workers=workers, max_failures=1, callbacks=(collector,))
    assert collector.attempts == 2
    resumed_parameters, resumed_rows = killed.return_value
    assert 0 < len(resumed_rows) < len(rows)
    assert resumed_rows == rows[-len(resumed_rows) :]
    assert resumed_parameters == parameters


def test_checkpoints_after_a_resume_contain_the_same_position(fit: Callable[..., Result]):
    config = {"every": "epoch"}
    undisturbed = fit(train, config)
    killed = fit(train, {**config, "kill_at": STEPS + 3}, max_failures=1)
    expected, positions = saved_positions(undisturbed), saved_positions(killed)
    assert [position["epoch"] for position in expected] == [0, 1, 2]
    assert positions == expected


def saved_positions(result: Result) -> list[dict[str, Any]]:
    """Return the position of the loader on rank 0 in each checkpoint."""
    positions = []
    for checkpoint, _ in result.best_checkpoints:
        content = torch.load(Path(checkpoint.path, RayTrainReportCallback.CHECKPOINT_NAME), weights_only=False)
        loader = content["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        positions.append(loader["drivetrain_ranks"][0])
    return positions


def test_one_worker_reads_each_row_once_that_two_have_not_read(fit: Callable[..., Result]):
    undisturbed = fit(train, {"every": 2})
    by_step = {metrics["step"]: checkpoint for checkpoint, metrics in undisturbed.best_checkpoints}
    first = undisturbed.return_value[1][STEPS : STEPS + 2]
    rest = fit(train, {"every": 2}, workers=1, resume_from=by_step[STEPS + 2]).return_value[1][: STEPS - 2]
    read = list(chain(*first, *rest))
    assert set(read) == set(range(ROWS))
    assert len(read) == ROWS, "two rows are repeated only for two workers"
