"""A script as people write it, for drivetrain: DDP, a loader, an optimizer and a scheduler."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, prepare_data_loader, prepare_model

from stamps import options, stamp  # isort: skip


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def train_func(config: dict[str, str]) -> None:
    stamp(config, "train_function")
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = prepare_model(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for step, (inputs, targets) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step == 3:
            stamp(config, "third_step", loss=loss.item(), rank=drivetrain.get_context().get_world_rank())


if __name__ == "__main__":
    config = options()
    TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    ).fit()
