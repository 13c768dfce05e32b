"""A trivial torch job for torchrun."""

import torch
import torch.distributed as dist
from stamps import hold, options, stamp

if __name__ == "__main__":
    config = options()
    dist.init_process_group("gloo")
    stamp(config, "train_function")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    hold(config)
    dist.destroy_process_group()
