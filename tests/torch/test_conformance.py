"""The conformance kits applied to the torch backend and its trainer."""

from typing import Any

import drivetrain
from drivetrain_testing import BackendConformance, TrainerConformance
from drivetrain_torch import TorchConfig, TorchTrainer


class TestTorch(BackendConformance):
    config = TorchConfig()
    framework = "torch"

    @staticmethod
    def all_sum(value: float) -> float:
        import torch

        tensor = torch.tensor([value])
        torch.distributed.all_reduce(tensor)
        return tensor.item()


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


class TestTorchTrainer(TrainerConformance):
    trainer = TorchTrainer
    name = "torch"

    def arguments(self) -> dict[str, Any]:
        config = TorchConfig(timeout_s=60)
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}, "torch_config": config}
