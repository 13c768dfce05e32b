"""An optimizer that was created before prepare_model trains the model, or is refused. It is never without effect."""

# arguments: local
# campaign: ray

import sys

import torch

import drivetrain
from drivetrain_torch import TorchTrainer, prepare_model


def train_steps(config):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    if config["strategy"] == "prepare":
        model, optimizer = drivetrain.prepare(network, optimizer)
    else:
        model = prepare_model(network, parallel_strategy=config["strategy"])
    losses = []
    for _ in range(4):
        loss = model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def outcome(runtime, strategy):
    trainer = TorchTrainer(
        train_steps,
        train_loop_config={"strategy": strategy},
        scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime=runtime),
        run_config=drivetrain.RunConfig(verbose=0, worker_output="none"),
    )
    try:
        losses = trainer.fit().return_value
    except drivetrain.TrainingFailedError as error:
        return "refused" if "create the optimizer from the model" in str(error) else str(error)
    return "learns" if losses[-1] < losses[0] else "does not learn"


if __name__ == "__main__":
    expected = {"prepare": "learns", "ddp": "learns", "fsdp": "refused", "fsdp2": "refused"}
    found = {strategy: outcome(sys.argv[1], strategy) for strategy in expected}
    print(found)
    sys.exit(found != expected)
