"""Batches of iterators that the user's own `DataConfig` has created are on the worker's device."""

# campaign: ray

import sys

import ray
import torch

import drivetrain
import drivetrain_torch
from drivetrain import DataConfig, DataParallelTrainer, RunConfig, ScalingConfig


class OwnConfig(DataConfig):
    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **kwargs):
        shards = datasets["train"].streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
        return [{"train": shard} for shard in shards]


def device_of_batch():
    drivetrain_torch.get_device = lambda: torch.device("meta")  # in place of a GPU
    batch = next(iter(drivetrain.get_dataset_shard("train").iter_torch_batches(batch_size=4)))
    return str(batch["id"].device)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, logging_level="ERROR")
    trainer = DataParallelTrainer(
        device_of_batch,
        datasets={"train": ray.data.range(16).materialize()},
        dataset_config=OwnConfig(),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(verbose=0),
    )
    device = trainer.fit().return_value
    print(device)
    ray.shutdown()
    sys.exit(0 if device == "meta" else 1)
