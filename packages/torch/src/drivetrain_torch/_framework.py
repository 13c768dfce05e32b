"""Describes PyTorch for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

from drivetrain.plugin import Framework, is_instance_of

__all__ = ["TorchFramework"]

_OF_PROCESS = (
    ("torch.distributed", "ProcessGroup"),
    ("torch.distributed", "Store"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.utils.data.distributed", "DistributedSampler"),
)
"""Classes whose objects contain a process group, or the rank and the world size."""


class TorchFramework(Framework):
    """Seeds PyTorch's generators, and knows the objects that contain a process group or a rank."""

    def reseed(self) -> None:
        """Seed the default generators. Those of an accelerator that is not initialized are seeded when it is."""
        import torch

        torch.seed()

    def belongs_to_process(self, value: object) -> bool:
        """Return True for process groups, and for models and samplers that were created for one."""
        return any(is_instance_of(value, module, name) for module, name in _OF_PROCESS)
