"""A way to train a PyTorch model on several workers: ``prepare_model(model, parallel_strategy="acme_average")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import get_context
from drivetrain_torch import ParallelStrategy

if TYPE_CHECKING:
    import torch

__all__ = ["AverageGradients"]


class AverageGradients(ParallelStrategy):
    """Averages each gradient over the workers as soon as it is computed. The model keeps its class and its names.

    Args:
        compress: send the gradients as ``bfloat16``, which halves the traffic of a model in ``float32``.
    """

    def __init__(self, *, compress: bool = False) -> None:
        self._compress = compress

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Give all workers the parameters and buffers of rank 0, and register a hook for each gradient."""
        import torch
        import torch.distributed as dist

        world_size = get_context().get_world_size()

        def average(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            sent = gradient.to(torch.bfloat16) if self._compress else gradient
            dist.all_reduce(sent.div_(world_size))
            if sent is not gradient:
                gradient.copy_(sent)

        for value in (*model.parameters(), *model.buffers()):
            dist.broadcast(value.detach(), src=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
        return model
