"""Steps under Accelerate, for its own launcher."""

import os

import torch.distributed as dist
from accelerated import train
from stamps import options

if __name__ == "__main__":
    train(options(steps=800))
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's exit after Gloo aborts sporadically, which would fail the pair
