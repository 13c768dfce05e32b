"""Two DDP jobs one after the other from the same driver, on drivetrain."""

import time

import torch.distributed as dist
from ddp import DistributedDataParallel, backward, make_batch, make_model
from stamps import options, stamp

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer

FIRST_FIT_S = 2.0


def train_func(config):
    stamp(config, "train_function")
    model = DistributedDataParallel(make_model())
    backward(model, make_batch(dist.get_rank()))
    stamp(config, "backward")
    if config["number"] == 0:
        time.sleep(FIRST_FIT_S)


if __name__ == "__main__":
    config = options()
    for number in range(2):
        trainer = TorchTrainer(
            train_func,
            train_loop_config={**config, "number": number},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=config["storage"]),
        )
        stamp(config, "fit_called")
        trainer.fit()
