"""A parallel strategy for PyTorch that exchanges gradients as 16-bit numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain_torch import ParallelStrategy

if TYPE_CHECKING:
    import torch


class FP16Strategy(ParallelStrategy):
    """Data parallelism that sends half as many bytes as `ddp`.

    Args:
        bucket_cap_mb: the size of the parts in which gradients are exchanged.
    """

    def __init__(self, bucket_cap_mb: int = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Wrap the model. Every worker calls this method."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            fp16_compress_hook,
        )
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model, bucket_cap_mb=self.bucket_cap_mb)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped
