"""A trivial torch job on drivetrain, with its imports at the top of the script."""

import torch
import torch.distributed as dist

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer

from stamps import end, hold, options, stamp  # isort: skip


def train_func(config):
    assert dist.is_initialized()
    stamp(config, "train_function")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    hold(config)
    end(config, dist.get_rank())


if __name__ == "__main__":
    config = options(runtime="local", fail=0)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, runtime=config["runtime"]),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    stamp(config, "fit_called")
    try:
        trainer.fit()
    finally:
        stamp(config, "fit_ended")
