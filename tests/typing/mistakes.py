"""Mistakes of a user, each between its comment and the next one. The file is only type-checked, and never executed."""

from dataclasses import dataclass
from typing import TypedDict

import drivetrain
from drivetrain import Checkpoint, CheckpointConfig, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer
from drivetrain_gbdt.xgboost import XGBoostTrainer
from drivetrain_hf.accelerate import AccelerateTrainer
from drivetrain_horovod import HorovodTrainer
from drivetrain_interactive import Trainer
from drivetrain_jax import JaxTrainer
from drivetrain_tf import TensorflowTrainer
from drivetrain_torch import TorchTrainer


class Settings(TypedDict):
    lr: float
    epochs: int


@dataclass(frozen=True)
class Options:
    lr: float = 0.1


class Printer:
    def on_epoch(self, epoch: int) -> None:
        print(epoch)


def train(settings: Settings) -> None:
    print(settings["epochs"])


def train_with_options(options: Options) -> None:
    print(options.lr)


def finish(checkpoint: Checkpoint, result: Result) -> None:
    drivetrain.report({"loss": 0.1}, checkpoint=checkpoint)

    # mistake: an unknown reduction
    drivetrain.report({"loss": 0.1}, reduce={"loss": "average"})

    # mistake: an unknown upload mode
    drivetrain.report({"loss": 0.1}, checkpoint=checkpoint, checkpoint_upload_mode="background")

    # mistake: a misspelled option next to a mapping
    drivetrain.report({"loss": 0.1}, checkpont=checkpoint)

    # mistake: a checkpoint as a metric
    drivetrain.report(loss=0.1, model=checkpoint)

    # mistake: an unknown mode
    result.get_best_checkpoint("loss", mode="minimum")

    # mistake: a misspelled attribute of the result
    print(result.metric["loss"])

    # mistake: a checkpoint that may be None
    print(result.checkpoint.path)

    # mistake: a shard used as an iterable
    for row in drivetrain.get_dataset_shard("train"):
        print(row)

    # mistake: an unknown placement strategy
    ScalingConfig(num_workers=2, placement_strategy="spread")

    # mistake: a number of workers as text
    ScalingConfig(num_workers="2")

    # mistake: an unknown order of scores
    CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="descending")

    # mistake: an unknown verbosity
    RunConfig(verbose=3)

    # mistake: a misspelled argument of a configuration
    RunConfig(storage_dir="/tmp/runs")

    # mistake: an integer as the rules for failures
    RunConfig(failure_config=3)

    # mistake: an object that is no callback
    RunConfig(callbacks=[Printer()])

    # mistake: a dict as the scaling configuration
    TorchTrainer(train_with_options, scaling_config={"num_workers": 2})

    # mistake: a config of another class than that of the function
    DataParallelTrainer(train_with_options, train_loop_config=Settings(lr=0.1, epochs=3))

    # mistake: a misspelled key of a TypedDict
    DataParallelTrainer(train, train_loop_config={"lr": 0.1, "epoch": 3})


def use_frameworks(settings: Settings, trainer: Trainer) -> None:
    # mistake: a config of another class, with PyTorch
    TorchTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with TensorFlow
    TensorflowTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with JAX
    JaxTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with Horovod
    HorovodTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with Accelerate
    AccelerateTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with XGBoost
    XGBoostTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with LightGBM
    LightGBMTrainer(train_with_options, train_loop_config=settings)

    # mistake: a config of another class, with the interactive trainer
    trainer.run(train_with_options, settings)
