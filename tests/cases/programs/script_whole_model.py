"""A train function saves whole objects of classes that the script defines, as it does under torchrun.

The files can be loaded in the worker, and in an ordinary process that runs the same script.
"""

# arguments: local; inprocess
# campaign: ray

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import drivetrain
from drivetrain_torch import TorchTrainer, prepare_model


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs)
        return outputs


@dataclasses.dataclass
class Arguments:
    lr: float = 0.1
    epochs: int = 2


def outcome_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def train(config: dict[str, Any]) -> dict[str, str]:
    net = Net()
    model = prepare_model(net)
    model(torch.rand(2, 4)).sum().backward()
    folder = Path(config["folder"]) / str(drivetrain.get_context().get_world_rank())
    folder.mkdir()
    state = {"arguments": config["arguments"], "state": net.state_dict()}
    return {
        "save the model": outcome_of(lambda: torch.save(net, folder / "model.pt")),
        "save the arguments": outcome_of(lambda: torch.save(state, folder / "last.pt")),
        "load the model": outcome_of(lambda: torch.load(folder / "model.pt", weights_only=False)(torch.rand(1, 4))),
    }


def main() -> bool:
    runtime = sys.argv[1]
    workers = drivetrain.ScalingConfig(
        num_workers=0 if runtime == "inprocess" else 2, runtime=None if runtime == "inprocess" else runtime
    )
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train,
            train_loop_config={"arguments": Arguments(lr=0.5), "folder": folder},
            scaling_config=workers,
            run_config=drivetrain.RunConfig(verbose=0),
        ).fit()
        outcomes = result.return_value
        print(outcomes)
        model = torch.load(Path(folder, "0", "model.pt"), weights_only=False)
        arguments = torch.load(Path(folder, "0", "last.pt"), weights_only=False)["arguments"]
    return set(outcomes.values()) == {"ok"} and type(model) is Net and arguments == Arguments(lr=0.5)


if __name__ == "__main__":
    sys.exit(not main())
