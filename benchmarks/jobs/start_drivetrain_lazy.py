"""A trivial torch job on drivetrain that imports torch in the train function."""

from stamps import hold, options, stamp

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


def train_func(config):
    import torch
    import torch.distributed as dist

    assert dist.is_initialized()
    stamp(config, "train_function")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    hold(config)


if __name__ == "__main__":
    config = options()
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
