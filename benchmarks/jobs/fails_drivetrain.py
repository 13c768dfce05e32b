"""One rank fails while the other is in an endless loop, on drivetrain."""

from failing import fail
from stamps import options, stamp

import drivetrain
from drivetrain import Callback, DataParallelTrainer, RunConfig, ScalingConfig


class Stamps(Callback):
    def on_group_stop(self, run, attempt):
        stamp(config, "noticed")


def train_func(config):
    if config["framework"] == "torch":
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
    context = drivetrain.get_context()
    fail(config, context.get_world_rank(), context.get_world_size())


if __name__ == "__main__":
    config = options(runtime="local", framework="none", how="kill")
    trainer_class = DataParallelTrainer
    if config["framework"] == "torch":
        from drivetrain_torch import TorchTrainer as trainer_class
    trainer = trainer_class(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, runtime=config["runtime"]),
        run_config=RunConfig(storage_path=config["storage"], callbacks=[Stamps()]),
    )
    try:
        trainer.fit()
    finally:
        stamp(config, "fit_ended")
