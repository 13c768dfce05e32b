"""The devices of this worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain import ConfigurationError, get_context

if TYPE_CHECKING:
    import torch

__all__ = ["cuda_indices", "get_device", "get_devices"]


def get_device() -> torch.device:
    """Return the device that this worker trains on: its first GPU, or the CPU if it has no GPU.

    Raises:
        SessionError: called outside a train function.

    Example:
        In a train function::

            images = images.to(drivetrain_torch.get_device())
    """
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """Return all devices of this worker: its GPUs, or the CPU if it has no GPU.

    Raises:
        SessionError: called outside a train function.
    """
    import torch

    gpus = get_context().worker.accelerator_ids
    return [torch.device("cuda", index) for index in cuda_indices(gpus)] or [torch.device("cpu")]


def cuda_indices(gpus: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the indices by which CUDA addresses the given GPUs in this process.

    The indices depend on the GPUs that the process can see: only the given GPUs, or all GPUs of the node.

    Args:
        gpus: the names of the GPUs, as in ``CUDA_VISIBLE_DEVICES``.
        environment: the environment variables of the process.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [int(gpu) for gpu in gpus]
    visible = [name.strip() for name in listed.split(",")]
    if hidden := [gpu for gpu in gpus if gpu not in visible]:
        raise ConfigurationError(
            f"CUDA_VISIBLE_DEVICES: expected a value with all GPUs of this worker ({', '.join(gpus)}), got {listed!r}, "
            f"which hides {', '.join(hidden)}. Do not change this variable in the train function"
        )
    return [visible.index(gpu) for gpu in gpus]
