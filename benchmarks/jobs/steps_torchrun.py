"""DDP steps for torchrun, without reports."""

import os

import torch.distributed as dist
from ddp import train
from stamps import options

if __name__ == "__main__":
    config = options(steps=800)
    dist.init_process_group("gloo")
    train(config, dist.get_rank())
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's exit after Gloo aborts sporadically, which would fail the pair
