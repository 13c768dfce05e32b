"""The Lightning training that the jobs run on each side: a small perceptron, on batches made in advance."""

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from ddp import WARMUP_STEPS, make_batch, make_model
from stamps import stamp
from torch.utils.data import DataLoader, IterableDataset


class SameBatch(IterableDataset):
    def __init__(self, rank: int, count: int) -> None:
        self.batch, self.count = make_batch(rank), count

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.count))


class Perceptron(pl.LightningModule):
    """Stamps its steps per second after the warm-up."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.network = make_model()
        self.config = config

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS:
            self.started = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS + self.config["steps"] - 1:
            stamp(
                self.config, "trained", steps_per_second=self.config["steps"] / (time.perf_counter() - self.started)
            )  # fmt: skip


def fit(config: dict[str, Any], rank: int, **options: Any) -> None:
    """Train one epoch of the configured number of steps, after the warm-up."""
    trainer = pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    steps = WARMUP_STEPS + config["steps"]
    trainer.fit(Perceptron(config), DataLoader(SameBatch(rank, steps), batch_size=None))
