"""Steps of a ``transformers.Trainer``, for torchrun."""

import os

import torch.distributed as dist
from stamps import options
from tuning import make_trainer

if __name__ == "__main__":
    make_trainer(options(steps=300)).train()
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's exit after Gloo aborts sporadically, which would fail the pair
