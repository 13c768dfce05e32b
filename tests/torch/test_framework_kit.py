"""The conformance kit of frameworks, applied to PyTorch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain_testing import FrameworkConformance


class TestFramework(FrameworkConformance):
    name = "torch"

    @staticmethod
    def draw() -> Any:
        return torch.rand(3).tolist()

    @staticmethod
    def make_objects_of_process() -> Sequence[Any]:
        sampler = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]
        return [sampler, DataLoader(range(4), sampler=sampler), torch.distributed.HashStore()]  # type: ignore[arg-type, attr-defined]
