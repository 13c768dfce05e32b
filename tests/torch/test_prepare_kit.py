"""The conformance kit applied to the function that prepares objects of torch."""

from typing import Any

from drivetrain_testing import PrepareConformance
from drivetrain_torch import TorchConfig


class TestPrepare(PrepareConformance):
    name = "torch"
    backend = TorchConfig()

    @staticmethod
    def make_objects() -> list[Any]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        return [
            model,
            DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2),
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, 1),
        ]
