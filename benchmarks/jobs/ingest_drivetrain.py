"""Parquet files as torch batches, under drivetrain: its own reader on this machine, or Ray Data's on Ray."""

from ingesting import BATCH_ROWS, read
from stamps import options

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


def train_func(config):
    batches = drivetrain.get_dataset_shard("train").iter_torch_batches(batch_size=BATCH_ROWS, drop_last=True)
    read(config, lambda: batches)


if __name__ == "__main__":
    config = options(data="", runtime="local")
    dataset = config["data"]
    if config["runtime"] == "ray":
        import ray.data

        dataset = ray.data.read_parquet(config["data"])
    TorchTrainer(
        train_func,
        train_loop_config=config,
        datasets={"train": dataset},
        scaling_config=ScalingConfig(num_workers=2, runtime=config["runtime"], resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=config["storage"], verbose=0),
    ).fit()
