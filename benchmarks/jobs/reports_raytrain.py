"""Workers without a framework that report in a loop, on Ray Train."""

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from reporting import reports
from stamps import options, stamp


def train_func(config):
    reports(config, ray.train.report, ray.train.get_context().get_world_rank())


if __name__ == "__main__":
    config = options(workers=2, cpus=1.0, reports=3, spin_us=0, fail=0)
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": config["cpus"]}),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    stamp(config, "fit_called")
    try:
        trainer.fit()
    finally:
        stamp(config, "fit_ended")
