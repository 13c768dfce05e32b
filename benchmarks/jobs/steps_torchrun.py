"""DDP steps for torchrun, without reports."""

import torch.distributed as dist
from ddp import train
from stamps import options

if __name__ == "__main__":
    config = options(steps=1000)
    dist.init_process_group("gloo")
    train(config, dist.get_rank())
    dist.destroy_process_group()
