"""What these tests train: a small network on scikit-learn's digits, by Lightning on the workers."""

import importlib.util
import os
import signal
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
"""Optimizer steps of an epoch, whatever the number of workers."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """What is trained on, and what is held out; read without importing scikit-learn, which takes most of a second."""
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations
    table = torch.tensor(numpy.loadtxt(Path(folder, "datasets", "data", "digits.csv.gz"), delimiter=","))
    features, targets = table[:, :-1].float() / 16, table[:, -1].long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    features, targets = features[order], targets[order]
    return TensorDataset(features[:TRAINED], targets[:TRAINED]), TensorDataset(features[TRAINED:], targets[TRAINED:])


class Digits(pl.LightningModule):
    """Sends its process a signal in a training step, on rank 1 in the first attempt, if told so."""

    def __init__(self, at_step: int | None = None, send: signal.Signals | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.at_step, self.send = at_step, send

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.send is not None and self.global_step == self.at_step:
            context = drivetrain.get_context()
            if context.attempt == 0 and context.get_world_rank() == 1:
                os.kill(os.getpid(), self.send)
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
    """Trains on this worker's part of the datasets; the accuracy on all that is held out."""

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
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self.network(batch[0]), batch[1]))
        optimizer.step()


class CompiledDigits(Digits):
    """Has its network compiled, without a compiler for the machine, which takes long."""

    def configure_model(self) -> None:
        self.network.compile(backend="eager")


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


class OwnShare(IterableDataset):
    """Every worker's part of a dataset, one sample after another."""

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

    # Else it compiles a faster way between the processes of one machine, for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return RayDeepSpeedStrategy(stage=2)


def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Goes on from a checkpoint if there is one, and returns the parameters."""
    strategy = config.get("strategy", "ddp")
    trainer = make_trainer(
        max_epochs=config["epochs"],
        min_epochs=config["epochs"],
        strategy=make_strategy(strategy),
        callbacks=[RayTrainReportCallback(**config.get("report", {})), *config.get("callbacks", ())],
    )
    prepare_trainer(trainer)
    module = Digits(config.get("at_step"), config.get("send"))
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
    """Trains with what a script has beside a model: validation, test, a logger, the facts about the processes."""
    context = drivetrain.get_context()
    trainer = make_trainer(
        max_epochs=6,
        logger=CSVLogger(Path(config["logs"], f"rank_{context.get_world_rank()}")),
        callbacks=[RayTrainReportCallback()],
    )
    assert prepare_trainer(trainer) is trainer
    assert (trainer.world_size, trainer.global_rank) == (context.get_world_size(), context.get_world_rank())
    assert (trainer.local_rank, trainer.node_rank) == (context.get_local_rank(), context.get_node_rank())
    assert trainer.num_devices == 1
    module, (trained, held_out) = Digits(), make_loaders()
    handler = signal.getsignal(signal.SIGTERM)
    trainer.fit(module, trained, held_out)
    assert trainer.train_dataloader.sampler.num_replicas == context.get_world_size()
    (found,) = trainer.test(module, held_out, verbose=False)
    assert signal.getsignal(signal.SIGTERM) == handler
    return found


def train_without_drivetrain() -> float:
    """The same by Lightning's own means, in one process."""
    trainer = make_trainer(max_epochs=6, strategy="auto", plugins=None, accelerator="cpu")
    trainer.fit(Digits(), *make_loaders())
    return float(trainer.callback_metrics["accuracy"])


def train_in_many_ways() -> dict[str, tuple[float, int]]:
    """The accuracy after two epochs and the steps taken, for all kinds of trainings."""
    trained, held_out = make_loaders()
    layers = RayFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={torch.nn.Linear})
    share = DataLoader(OwnShare(load()[0]), batch_size=trained.batch_size)
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
    found = {}
    for name, (module, loader, options) in ways.items():
        trainer = make_trainer(max_epochs=2, **options)
        trainer.fit(module, loader, held_out)
        found[name] = (float(trainer.callback_metrics["accuracy"]), trainer.global_step)
    return found


def fit_wrongly() -> dict[str, str]:
    """What is said to trainers that do not fit their worker."""

    def checks(**options: Any) -> None:
        prepare_trainer(make_trainer(**options))

    def fits(**options: Any) -> None:
        make_trainer(max_epochs=1, **options).fit(Digits(), *make_loaders())

    def prepares_for_gpu() -> None:
        trainer = make_trainer()
        trainer.strategy.parallel_devices = [torch.device("cuda", 0)]
        prepare_trainer(trainer)

    attempts = {
        "no trainer": lambda: prepare_trainer("ddp"),
        "strategy": lambda: checks(strategy="ddp"),
        "environment": lambda: checks(plugins=None),
        "devices": lambda: checks(devices=2, accelerator="cpu"),
        "accelerator": prepares_for_gpu,
        "strategy, in fit": lambda: fits(strategy="ddp"),
        "no strategy, in fit": lambda: fits(strategy="auto", callbacks=[RayTrainReportCallback()]),
        "environment, in fit": lambda: fits(plugins=None),
        "full state of fsdp": lambda: fits(strategy=RayFSDPStrategy()),
        "metric": lambda: fits(callbacks=[RayTrainReportCallback(metrics=["loss", "auc"])]),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except drivetrain.ConfigurationError as error:
            said[name] = str(error)
    return said
