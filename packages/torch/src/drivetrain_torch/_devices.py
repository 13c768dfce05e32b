"""Which devices are this worker's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain import ConfigurationError, WorkerInfo, get_context

if TYPE_CHECKING:
    import torch

__all__ = ["cuda_indices", "get_device", "get_devices", "shared_gpus"]


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


def shared_gpus(workers: Sequence[WorkerInfo]) -> list[str]:
    """For each worker, the GPUs of all workers of its node, as ``CUDA_VISIBLE_DEVICES`` has them.

    Where each worker has one, its number among them is its local rank, as under torchrun: scripts and libraries that
    take ``cuda:LOCAL_RANK`` for theirs are right, and NCCL can use direct paths between the GPUs of a node.
    """
    of_node: dict[str, dict[str, None]] = {}
    for worker in workers:
        of_node.setdefault(worker.node_id, {}).update(dict.fromkeys(worker.accelerator_ids))
    return [",".join(of_node[worker.node_id]) for worker in workers]


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
