"""Parquet files as torch batches, under Ray Train."""

import ray.data
import ray.train
from ingesting import BATCH_ROWS, read
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from stamps import options


def train_func(config):
    shard = ray.train.get_dataset_shard("train")
    read(config, lambda: shard.iter_torch_batches(batch_size=BATCH_ROWS, drop_last=True))


if __name__ == "__main__":
    config = options(data="")
    TorchTrainer(
        train_func,
        train_loop_config=config,
        datasets={"train": ray.data.read_parquet(config["data"])},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=config["storage"]),
    ).fit()
