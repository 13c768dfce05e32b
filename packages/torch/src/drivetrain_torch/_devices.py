"""Which devices are this worker's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain import ConfigurationError, get_context

if TYPE_CHECKING:
    import torch

__all__ = ["get_device", "get_devices"]


def get_device() -> torch.device:
    """The device that this worker trains on: the first of its GPUs, or the CPU without any.

    Raises:
        SessionError: called outside a train function.

    Example:
        In a train function::

            images = images.to(drivetrain_torch.get_device())
    """
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """All devices of this worker: its GPUs, or the CPU without any.

    Raises:
        SessionError: called outside a train function.
    """
    import torch

    gpus = get_context().worker.accelerator_ids
    return [torch.device("cuda", index) for index in cuda_indices(gpus)] or [torch.device("cpu")]


def cuda_indices(gpus: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[int]:
    """How CUDA numbers GPUs in this process, which may see only them, or all of the node.

    Args:
        gpus: their names, as ``CUDA_VISIBLE_DEVICES`` has them.
        environment: the process's variables.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [int(gpu) for gpu in gpus]
    visible = [name.strip() for name in listed.split(",")]
    if hidden := [gpu for gpu in gpus if gpu not in visible]:
        raise ConfigurationError(
            f"this worker's GPUs are {', '.join(gpus)}, and CUDA_VISIBLE_DEVICES={listed!r} hides "
            f"{', '.join(hidden)}: leave that variable alone in the train function"
        )
    return [visible.index(gpu) for gpu in gpus]
