"""DDP jobs one after the other on the workers of one interactive trainer, on drivetrain."""

import time

import torch.distributed as dist
from ddp import DistributedDataParallel, backward, make_batch, make_model
from stamps import options, stamp

from drivetrain_interactive import Trainer

RUNS = 2
PAUSE_S = 1.0  # like a user who reads the result of a cell


def train_func(config):
    stamp(config, "train_function", run=config["number"])
    model = DistributedDataParallel(make_model())
    backward(model, make_batch(dist.get_rank()))
    stamp(config, "backward", run=config["number"])


if __name__ == "__main__":
    config = options(runtime="local")
    with Trainer("torch", 2, runtime=config["runtime"], logdir=config["storage"]) as trainer:
        for number in range(RUNS):
            time.sleep(PAUSE_S)
            stamp(config, "fit_called", run=number)
            trainer.run(train_func, config={**config, "number": number})
            stamp(config, "fit_ended", run=number)
