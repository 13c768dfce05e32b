"""The train functions of these tests: they train a small network on scikit-learn's digits with Lightning."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import drivetrain
from drivetrain_lightning import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)

TRAINED, BATCH = 1408, 64
STEPS = TRAINED // BATCH
"""Optimizer steps per epoch, independent of the number of workers."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the training data and the held-out data, without importing scikit-learn, which takes most of a second."""
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations
    table = torch.tensor(numpy.loadtxt(Path(folder, "datasets", "data", "digits.csv.gz"), delimiter=","))
    features, targets = table[:, :-1].float() / 16, table[:, -1].long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    features, targets = features[order], targets[order]
    return TensorDataset(features[:TRAINED], targets[:TRAINED]), TensorDataset(features[TRAINED:], targets[TRAINED:])


class Digits(pl.LightningModule):
    """A classifier that can send a signal to its process in a training step, on the last rank in the first attempt.

    After SIGTERM the steps are slow, so that the ranks receive the notice of the preemption before the epoch ends.
    With dropout, each rank draws its own random numbers.
    """

    def __init__(
        self, at_step: int | None = None, send: signal.Signals | None = None, dropout: float | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
        if dropout is not None:
            layers.insert(2, torch.nn.Dropout(dropout))
            torch.manual_seed(drivetrain.get_context().get_world_rank())
        self.network = torch.nn.Sequential(*layers)
        self.at_step, self.send = at_step, send

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.send is not None and self.global_step >= self.at_step:
            context = drivetrain.get_context()
            if context.attempt == 0 and context.get_world_rank() == context.get_world_size() - 1:
                if self.global_step == self.at_step:
                    os.kill(os.getpid(), self.send)
                time.sleep(0.5)
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("logged_last", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", self.accuracy(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_accuracy", self.accuracy(batch), sync_dist=True)

    def accuracy(self, batch: Any) -> torch.Tensor:
        return (self.network(batch[0]).argmax(1) == batch[1]).float().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.005)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


def train_on_shards() -> float:
    """Train on this worker's part of the datasets; return the accuracy on all of the held-out data."""

    def tensors(columns: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(columns["image"]), torch.tensor(columns["label"])

    loaders = {
        name: drivetrain.get_dataset_shard(name).iter_torch_batches(batch_size=BATCH // 2, collate_fn=tensors)
        for name in ("train", "valid")
    }
    trainer = pl.Trainer(
        max_epochs=6,
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
    )
    prepare_trainer(trainer).fit(Digits(), loaders["train"], loaders["valid"])
    return float(trainer.callback_metrics["accuracy"])


class ManualDigits(Digits):
    """A classifier with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self.network(batch[0]), batch[1]))
        optimizer.step()


class CompiledDigits(Digits):
    """A classifier with a compiled network. The eager backend avoids the slow generation of machine code."""

    def configure_model(self) -> None:
        self.network.compile(backend="eager")


class ResumableLoader(DataLoader):
    """A data loader that resumes within an epoch, as torchdata's StatefulDataLoader does."""

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


class WorkerShare(IterableDataset):
    """The samples of this worker's part of a dataset."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        context = drivetrain.get_context()
        return (self.dataset[i] for i in range(context.get_world_rank(), len(self.dataset), context.get_world_size()))


def make_loaders(loader: type[DataLoader] = DataLoader) -> tuple[DataLoader, DataLoader]:
    trained, held_out = load()
    size = BATCH // drivetrain.get_context().get_world_size()
    return loader(trained, batch_size=size, shuffle=True), DataLoader(held_out, batch_size=size)


def make_trainer(**options: Any) -> pl.Trainer:
    defaults = {
        **{"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False},
        **{"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]},
    }
    return pl.Trainer(**{**defaults, **options})


def make_strategy(name: str) -> Any:
    if name == "fsdp":
        return RayFSDPStrategy(state_dict_type="sharded")
    if name == "ddp":
        return RayDDPStrategy()
    import deepspeed

    # Otherwise DeepSpeed spends half a minute compiling an operation for communication within one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return RayDeepSpeedStrategy(stage=2)


def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train, from a checkpoint if there is one, and return the parameters."""
    strategy = config.get("strategy", "ddp")
    trainer = make_trainer(
        max_epochs=config["epochs"],
        min_epochs=config["epochs"],
        strategy=make_strategy(strategy),
        callbacks=[RayTrainReportCallback(**config.get("report", {})), *config.get("callbacks", ())],
    )
    prepare_trainer(trainer)
    module = Digits(config.get("at_step"), config.get("send"), config.get("dropout"))
    loaders = make_loaders(ResumableLoader if config.get("resumable") else DataLoader)
    if (checkpoint := drivetrain.get_checkpoint()) is None:
        trainer.fit(module, *loaders)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(module, *loaders, ckpt_path=Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    if strategy == "fsdp":
        with FullyShardedDataParallel.summon_full_params(trainer.model):
            return parameters_of(module)
    return parameters_of(module)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def train_and_test(config: dict[str, Any]) -> dict[str, Any]:
    """Train with validation, test and a logger, as scripts do, and check the ranks that the trainer sees."""
    context = drivetrain.get_context()
    trainer = make_trainer(
        max_epochs=6,
        logger=CSVLogger(Path(config["logs"], f"rank_{context.get_world_rank()}")),
        callbacks=[RayTrainReportCallback()],
    )
    assert drivetrain.prepare(trainer) is trainer
    assert (trainer.world_size, trainer.global_rank) == (context.get_world_size(), context.get_world_rank())
    assert (trainer.local_rank, trainer.node_rank) == (context.get_local_rank(), context.get_node_rank())
    assert trainer.num_devices == 1
    module, (trained, held_out) = Digits(), make_loaders()
    handler = signal.getsignal(signal.SIGTERM)
    trainer.fit(module, trained, held_out)
    assert trainer.train_dataloader.sampler.num_replicas == context.get_world_size()
    (metrics,) = trainer.test(module, held_out, verbose=False)
    assert signal.getsignal(signal.SIGTERM) == handler
    return metrics


def train_without_drivetrain() -> float:
    """Train the same model with Lightning's own strategy, in one process."""
    trainer = make_trainer(max_epochs=6, strategy="auto", plugins=None, accelerator="cpu")
    trainer.fit(Digits(), *make_loaders())
    return float(trainer.callback_metrics["accuracy"])


def train_in_many_ways() -> dict[str, tuple[float, int]]:
    """Return the accuracy after two epochs and the number of steps, for each kind of training."""
    trained, held_out = make_loaders()
    layers = RayFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={torch.nn.Linear})
    share = DataLoader(WorkerShare(load()[0]), batch_size=trained.batch_size)
    ways: dict[str, tuple[Any, DataLoader, dict[str, Any]]] = {
        "accumulated": (Digits(), trained, {"accumulate_grad_batches": 2}),
        "bf16": (Digits(), trained, {"precision": "bf16-mixed"}),
        "manual": (ManualDigits(), trained, {}),
        "compiled": (CompiledDigits(), trained, {}),
        "iterable": (Digits(), share, {}),
        "fsdp": (
            Digits(),
            trained,
            {"strategy": layers},
        ),
    }
    outcomes = {}
    for name, (module, loader, options) in ways.items():
        trainer = make_trainer(max_epochs=2, **options)
        trainer.fit(module, loader, held_out)
        outcomes[name] = (float(trainer.callback_metrics["accuracy"]), trainer.global_step)
    return outcomes


def fit_misconfigured_trainers() -> dict[str, str]:
    """Return the error messages for trainers that are not configured for their worker."""

    def prepare(**options: Any) -> None:
        drivetrain.prepare(make_trainer(**options))

    def fit(**options: Any) -> None:
        make_trainer(max_epochs=1, **options).fit(Digits(), *make_loaders())

    def prepare_for_gpu() -> None:
        trainer = make_trainer()
        trainer.strategy.parallel_devices = [torch.device("cuda", 0)]
        prepare_trainer(trainer)

    attempts = {
        "no trainer": lambda: prepare_trainer("ddp"),
        "module": lambda: drivetrain.prepare(Digits()),
        "strategy": lambda: prepare(strategy="ddp"),
        "environment": lambda: prepare(plugins=None),
        "devices": lambda: prepare(devices=2, accelerator="cpu"),
        "accelerator": prepare_for_gpu,
        "strategy, in fit": lambda: fit(strategy="ddp"),
        "alone, in fit": lambda: fit(strategy="auto", plugins=None, devices="auto", accelerator="cpu"),
        "no strategy, in fit": lambda: fit(strategy="auto", callbacks=[RayTrainReportCallback()]),
        "environment, in fit": lambda: fit(plugins=None),
        "full state of fsdp": lambda: fit(strategy=RayFSDPStrategy()),
        "metric": lambda: fit(callbacks=[RayTrainReportCallback(metrics=["loss", "auc"])]),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except drivetrain.ConfigurationError as error:
            messages[name] = str(error)
    return messages
