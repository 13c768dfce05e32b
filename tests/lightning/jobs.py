"""What these tests train: a small network on scikit-learn's digits, by Lightning on the workers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain_lightning import (
    RayDDPStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)

TRAINED, BATCH = 1408, 64
STEPS = TRAINED // BATCH
"""Optimizer steps of an epoch, whatever the number of workers."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """What is trained on, and what is held out."""
    images, labels = load_digits(return_X_y=True)
    features, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    features, targets = features[order], targets[order]
    return TensorDataset(features[:TRAINED], targets[:TRAINED]), TensorDataset(features[TRAINED:], targets[TRAINED:])


class Digits(pl.LightningModule):
    """Dies, or asks to be preempted, in a training step if told so."""

    def __init__(self, at_step: int | None = None, send: signal.Signals | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.at_step, self.send = at_step, send

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        context = drivetrain.get_context()
        if self.global_step == self.at_step and context.attempt == 0 and context.get_world_rank() == 1:
            os.kill(os.getpid(), self.send)
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", self.accuracy(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_accuracy", self.accuracy(batch), sync_dist=True)

    def accuracy(self, batch: Any) -> torch.Tensor:
        return (self.network(batch[0]).argmax(1) == batch[1]).float().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.005)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


class ResumableLoader(DataLoader):
    """Goes on within an epoch, as torchdata's StatefulDataLoader does."""

    begin = served = 0

    def __iter__(self) -> Iterator[Any]:
        self.served, begin, self.begin = self.begin, self.begin, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.served += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["served"]


def make_loaders(loader: type[DataLoader] = DataLoader) -> tuple[DataLoader, DataLoader]:
    trained, held_out = load()
    size = BATCH // drivetrain.get_context().get_world_size()
    return loader(trained, batch_size=size, shuffle=True), DataLoader(held_out, batch_size=size)


def make_trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        **{
            **quiet,
            "enable_checkpointing": False,
            "strategy": RayDDPStrategy(),
            "plugins": [RayLightningEnvironment()],
            **options,
        }
    )


def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A train function that goes on from a checkpoint, and returns the parameters."""
    strategy = RayFSDPStrategy(state_dict_type="sharded") if config.get("strategy") == "fsdp" else RayDDPStrategy()
    trainer = make_trainer(
        max_epochs=config["epochs"],
        min_epochs=config["epochs"],
        strategy=strategy,
        callbacks=[RayTrainReportCallback(every=config.get("every", "epoch")), *config.get("callbacks", ())],
    )
    prepare_trainer(trainer)
    module = Digits(config.get("at_step"), config.get("send"))
    loaders = make_loaders(ResumableLoader if config.get("resumable") else DataLoader)
    if (checkpoint := drivetrain.get_checkpoint()) is None:
        trainer.fit(module, *loaders)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(module, *loaders, ckpt_path=Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    if config.get("strategy") != "fsdp":
        return {name: value.detach().clone() for name, value in module.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        return {name: value.detach().clone() for name, value in module.named_parameters()}
