"""PyTorch with ``TrainState``: DistributedDataParallel, or the strategy that is named."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, TrainState, enable_reproducibility, prepare_data_loader, prepare_model


def train_func(config):
    enable_reproducibility(seed=0)
    rows = torch.randn(240, 16)
    data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    loader = prepare_data_loader(DataLoader(data, batch_size=10, shuffle=True))
    network = torch.nn.Sequential(
        torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
    )
    model = prepare_model(network, parallel_strategy=config["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for _ in state.epochs(8):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        scheduler.step()
        state.save({"loss": loss})


def make_trainer(scaling_config, strategy="ddp", **options):
    return TorchTrainer(
        train_func,
        train_loop_config={"strategy": strategy},
        scaling_config=scaling_config,
        run_config=RunConfig(worker_output="none", **options),
    )


if __name__ == "__main__":
    strategy, workers = sys.argv[1:]
    make_trainer(ScalingConfig(num_workers=int(workers)), strategy).fit()
