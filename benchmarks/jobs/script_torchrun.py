"""A script as people write it, for torchrun: DDP, a loader, an optimizer and a scheduler."""

import os

import torch
import torch.distributed as dist
from stamps import options, stamp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def main() -> None:
    config = options()
    dist.init_process_group("gloo")
    stamp(config, "train_function")
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for step, (inputs, targets) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step == 3:
            stamp(config, "third_step", loss=loss.item(), rank=int(os.environ["RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
