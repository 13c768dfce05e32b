"""The conformance kit applied to the backend of an ``AccelerateTrainer``."""

from drivetrain.testing import BackendConformance
from drivetrain_hf._accelerate import AccelerateConfig
from drivetrain_torch import TorchConfig


class TestAccelerate(BackendConformance):
    config = AccelerateConfig(torch=TorchConfig(), accelerate={"distributed_type": "NO"})
    framework = "torch"

    @staticmethod
    def all_sum(value: float) -> float:
        import torch
        from accelerate import Accelerator

        return Accelerator().reduce(torch.tensor([value])).item()
