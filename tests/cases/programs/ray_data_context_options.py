"""Ray Data executes a dataset with the options of the user's `DataContext`, and leaves them as they are."""

# campaign: ray

import sys
import time

import ray

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def slow(batch):
    time.sleep(2 if batch["id"][0] == 0 else 0)
    return batch


def first_ids():
    batches = drivetrain.get_dataset_shard("train").iter_batches(batch_size=50)
    return [int(batch["id"][0]) for batch in batches]


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, logging_level="ERROR")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    dataset = ray.data.range(400, override_num_blocks=8).map_batches(slow, batch_size=50)
    trainer = DataParallelTrainer(
        first_ids,
        datasets={"train": dataset},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(verbose=0),
    )
    ids = trainer.fit().return_value
    print(ids)
    kept = dataset.context.execution_options
    right = kept.preserve_order and kept.is_resource_limits_default() and ids == list(range(0, 400, 50))
    ray.shutdown()
    sys.exit(0 if right else 1)
