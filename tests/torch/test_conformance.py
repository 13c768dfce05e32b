"""The conformance kit applied to the torch backend."""

from drivetrain.testing import BackendConformance
from drivetrain_torch import TorchConfig


class TestTorch(BackendConformance):
    config = TorchConfig()
    framework = "torch"

    @staticmethod
    def all_sum(value: float) -> float:
        import torch

        tensor = torch.tensor([value])
        torch.distributed.all_reduce(tensor)
        return tensor.item()
