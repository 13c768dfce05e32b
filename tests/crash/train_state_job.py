"""A job of the crash harness whose checkpoints are written by ``TrainState``, whole or sharded."""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, TrainState, enable_reproducibility, prepare_data_loader, prepare_model


def train(config: dict[str, Any]) -> None:
    enable_reproducibility(0)
    model = prepare_model(torch.nn.Linear(1, 1), parallel_strategy=config["strategy"])
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.arange(16.0).unsqueeze(1) / 16
    loader = prepare_data_loader(DataLoader(rows, batch_size=2, shuffle=True))
    state = TrainState(model, optimizer, loader=loader)
    for _ in state.epochs(2):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
            mode = "async" if state.steps % 2 else "sync"
            state.save({"step": state.steps, "loss": loss}, checkpoint_upload_mode=mode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp")
    TorchTrainer(
        train,
        train_loop_config=vars(parser.parse_args()),
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(
            name="run",
            resume="auto",
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
