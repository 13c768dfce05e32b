"""Trains the same model with ``ddp``, ``acme_average`` and its option, and reports the parameters."""

import json
import sys

import torch

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, prepare_model

arguments = json.loads(sys.argv[1])


def parameters_after_training(strategy: str, **options: object) -> list[float]:
    rank = drivetrain.get_context().get_world_rank()
    torch.manual_seed(0)
    data, targets = torch.randn(16, 4), torch.randn(16, 1)
    torch.manual_seed(rank)  # the strategy gives all workers the parameters of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = prepare_model(model, parallel_strategy=strategy, parallel_strategy_kwargs=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data[rank::2]), targets[rank::2]).backward()
        optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def train() -> None:
    drivetrain.report(
        {
            "ddp": parameters_after_training("ddp"),
            "average": parameters_after_training("acme_average"),
            "compressed": parameters_after_training("acme_average", compress=True),
        }
    )


if __name__ == "__main__":
    result = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=arguments["storage_path"], verbose=0),
    ).fit()
    print(json.dumps({name: result.metrics[name] for name in ("ddp", "average", "compressed")}))
