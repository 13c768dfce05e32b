"""Programs without mistakes. The file is only type-checked, strictly, and never executed."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from typing_extensions import Unpack

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from drivetrain.plugin import Report, Run
from drivetrain.plugin.datasets import WorkerShard
from drivetrain.plugin.trainers import CommonArguments, ConfigT, TrainFunction, checked_config
from drivetrain_data import TableShard
from drivetrain_gbdt.lightgbm import LightGBMTrainer
from drivetrain_gbdt.xgboost import XGBoostTrainer
from drivetrain_hf.accelerate import AccelerateTrainer
from drivetrain_horovod import HorovodTrainer
from drivetrain_interactive import Trainer
from drivetrain_jax import JaxTrainer
from drivetrain_tf import TensorflowTrainer
from drivetrain_torch import TorchConfig, TorchTrainer
from drivetrain_tune import TuneConfig, Tuner, grid_search


class Settings(TypedDict):
    lr: float
    epochs: int


@dataclass(frozen=True, slots=True)
class Options:
    lr: float = 0.1
    epochs: int = 3


class Printer(Callback):
    def on_report(self, run: Run, report: Report) -> None:
        print(run.name, report.iteration)


def without_config() -> None:
    drivetrain.report(loss=0.1, phase="warmup")
    drivetrain.report(loss=0.1, reduce={"loss": "mean"})
    drivetrain.report({"loss": 0.1, "sizes": [1, 2]})
    drivetrain.report(metrics={"loss": 0.1}, wait=2.5)


def with_dict(config: dict[str, Any]) -> None:
    drivetrain.report({"lr": config["lr"]})


def with_mapping(config: Mapping[str, float]) -> None:
    drivetrain.report(lr=config["lr"])


def with_settings(settings: Settings) -> int:
    return settings["epochs"]


def with_options(options: Options) -> None:
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            print(directory)
    context = drivetrain.get_context()
    for epoch in range(options.epochs):
        drivetrain.heartbeat()
        if context.get_world_rank() == 0:
            drivetrain.report({"epoch": epoch}, Checkpoint.from_directory("model"), checkpoint_ranks=[0])
        else:
            drivetrain.report({"epoch": epoch}, checkpoint_ranks="all")
        with drivetrain.shared_checkpoint() as shared:
            drivetrain.report(
                {"epoch": epoch, "lr": options.lr},
                checkpoint=shared,
                checkpoint_dir_name=f"epoch_{epoch}",
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC if epoch else "sync",
            )
        if drivetrain.get_preemption_info() is not None:
            return drivetrain.resume_later()


def on_shards() -> None:
    shard = drivetrain.get_dataset_shard("train")
    for batch in shard.iter_torch_batches(batch_size=32, drop_last=True):
        print(batch["x"])
    for row in shard.iter_rows():
        print(row)
    for table in shard.iter_batches(batch_format="pyarrow"):
        print(table.num_rows)
    shard.load_state_dict(shard.state_dict())
    print(count_rows(shard), shard.to_pandas().shape)
    assert isinstance(shard, TableShard)
    print(shard.rows, count_rows(shard))
    custom: Any = drivetrain.get_dataset_shard("custom")
    print(len(custom))


def count_rows(shard: WorkerShard) -> int:
    return shard.count()


def as_worker_shard(shard: TableShard) -> WorkerShard:
    return shard  # an error if the signature of a method differs


def scaling() -> ScalingConfig:
    return ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}, placement_strategy="SPREAD")


def run_config() -> RunConfig:
    return RunConfig(
        name="types",
        failure_config=FailureConfig(max_failures=1, fail_fast="raise"),
        checkpoint_config=CheckpointConfig(num_to_keep=1, checkpoint_score_order="min"),
        callbacks=[Printer(), "mlflow"],
        stop={"loss": 0.1},
        verbose=0,
        resume="auto",
    )


def train_core(arguments: argparse.Namespace) -> None:
    DataParallelTrainer(without_config)
    DataParallelTrainer(without_config, train_loop_config={"ignored": 1})
    DataParallelTrainer(with_dict, train_loop_config=vars(arguments))
    DataParallelTrainer(with_dict, train_loop_config={"lr": 0.1, "name": "a"}, backend_config="torch")
    DataParallelTrainer(with_mapping, train_loop_config={"lr": 0.1})
    DataParallelTrainer(with_settings, train_loop_config=Settings(lr=0.1, epochs=3))
    DataParallelTrainer(lambda: drivetrain.report(loss=0.1), scaling_config=scaling(), run_config=run_config())
    trainer = DataParallelTrainer(
        with_options,
        train_loop_config=Options(epochs=2),
        datasets={"train": "rows.parquet"},
        dataset_config=DataConfig(["train"]),
        metadata={"task": "types"},
    )
    result = trainer.fit(raise_on_failure=False)
    if result.checkpoint is not None:
        print(result.checkpoint.path, result.metrics["loss"], result.error)
    best = result.get_best_checkpoint("loss", mode="min")
    varied = trainer.vary({"train_loop_config": {"lr": 0.2}}, resume_from_checkpoint=best)
    with_handle = varied.start()
    print(with_handle.result(timeout_s=60).path)
    drivetrain.restore(result.path, with_options).fit()
    DataParallelTrainer.restore(result.path, train_loop_config=Options(epochs=4)).fit()


def train_frameworks() -> None:
    options, settings = Options(), Settings(lr=0.1, epochs=3)
    TorchTrainer(with_options, train_loop_config=options, torch_config=TorchConfig(init_method="tcp"))
    TorchTrainer(with_settings, train_loop_config=settings, scaling_config=scaling(), run_config=run_config())
    TensorflowTrainer(with_options, train_loop_config=options)
    JaxTrainer(with_options, train_loop_config=options)
    HorovodTrainer(with_options, train_loop_config=options)
    AccelerateTrainer(with_options, train_loop_config=options)
    XGBoostTrainer(with_options, train_loop_config=options)
    XGBoostTrainer(params={"objective": "binary:logistic"}, label_column="y", datasets={"train": "rows.parquet"})
    LightGBMTrainer(with_settings, train_loop_config=settings)


def tune_and_interact() -> None:
    trainer = TorchTrainer(with_options, train_loop_config=Options())
    space = {"train_loop_config": {"lr": grid_search([0.1, 0.2])}}
    results = Tuner(trainer, param_space=space, tune_config=TuneConfig(metric="loss", mode="min")).fit()
    print(results.get_best_result(mode="min").config)
    with Trainer("torch", num_workers=2) as workers:
        workers.run(with_options, Options())
        workers.run(with_dict, {"lr": 0.1})
        for reports in workers.run_iterator(with_settings, Settings(lr=0.1, epochs=3)):
            print(reports)


class OwnTrainer(DataParallelTrainer):
    """A trainer as the page about trainers describes it."""

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT],
        *,
        train_loop_config: ConfigT | None = None,
        torch_config: TorchConfig | None = None,
        **arguments: Unpack[CommonArguments],
    ) -> None:
        config = checked_config(torch_config, TorchConfig, "OwnTrainer(torch_config=...)")
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **arguments)


OwnTrainer(with_options, train_loop_config=Options(), scaling_config=scaling())
