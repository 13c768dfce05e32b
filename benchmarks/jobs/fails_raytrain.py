"""One rank fails while the other is in an endless loop, on Ray Train."""

import ray.train
from failing import fail
from ray.train import RunConfig, ScalingConfig, UserCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from stamps import options, stamp


class Stamps(UserCallback):
    def __init__(self, config):
        self._config = config

    def after_exception(self, run_context, worker_exceptions):
        stamp(self._config, "noticed")


def train_func(config):
    context = ray.train.get_context()
    fail(config, context.get_world_rank(), context.get_world_size())


if __name__ == "__main__":
    config = options(how="kill")
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"], callbacks=[Stamps(config)]),
    )
    try:
        trainer.fit()
    finally:
        stamp(config, "fit_ended")
