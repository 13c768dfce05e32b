"""A loop with Accelerate: every rank saves its state and reports it."""

import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Checkpoint, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


def train_func():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(7)
    rows = torch.randn(160, 16)
    data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=10, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first = 0
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            accelerator.load_state(directory)
        first = checkpoint.get_metadata()["epoch"] + 1
    for epoch in range(first, 8):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as directory:
            accelerator.save_state(directory)
            checkpoint = Checkpoint.from_directory(directory)
            checkpoint.set_metadata({"epoch": epoch})
            drivetrain.report({"loss": float(loss.detach())}, checkpoint)


def make_trainer(scaling_config, **options):
    return TorchTrainer(
        train_func,
        scaling_config=scaling_config,
        run_config=RunConfig(worker_output="none", preload=["accelerate"], **options),
    )


if __name__ == "__main__":
    make_trainer(ScalingConfig(num_workers=2)).fit()
