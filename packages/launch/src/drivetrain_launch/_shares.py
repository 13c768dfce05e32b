"""Divides the GPUs and CPUs that workers can see among the workers that see the same ones.

Some launchers give each process its own devices, others let all processes of a node see all devices. In the second case
the processes share the devices in equal parts, so that two workers do not use the same GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from drivetrain import ResourceError, ScalingConfig

__all__ = ["Share", "VisibleDevices", "divide"]


class VisibleDevices(NamedTuple):
    """The devices that a process can use.

    Attributes:
        node_id: the id of its node.
        gpus: the ids of the GPUs, as in ``CUDA_VISIBLE_DEVICES``.
        cpus: the numbers of the CPUs.
    """

    node_id: str
    gpus: tuple[str, ...]
    cpus: tuple[int, ...]


class Share(NamedTuple):
    """The devices of one worker.

    Attributes:
        gpus: the ids of its GPUs; empty if workers use no GPUs.
        threads: the number of threads of its numeric libraries.
    """

    gpus: tuple[str, ...]
    threads: int


def divide(scaling: ScalingConfig, visible: Mapping[int, VisibleDevices], *, may_be_confined: bool) -> dict[int, Share]:
    """Return the share of each worker.

    Args:
        scaling: the resources of each worker.
        visible: for each worker's index, the devices that its process can use.
        may_be_confined: True if the launcher may have confined each worker to its own GPUs, which then have the same
            ids in all workers of a node. If the workers of a node see exactly as many GPUs as one of them requires,
            each of them gets these GPUs.

    Raises:
        ResourceError: the workers of a node require more GPUs than they can use, or an impossible number.
    """
    each = scaling.num_gpus_per_worker
    if each > 1 and each != int(each):
        raise ResourceError(f"[DT-302] GPUs per worker: expected a whole number or a fraction below 1, got {each}")
    gpus: dict[int, tuple[str, ...]] = dict.fromkeys(visible, ())
    if each:
        for sharers in _groups({index: (devices.node_id, devices.gpus) for index, devices in visible.items()}):
            gpus |= _divide_gpus(each, sharers, visible[sharers[0]], may_be_confined)
    threads: dict[int, int] = {}
    for sharers in _groups({index: (devices.node_id, devices.cpus) for index, devices in visible.items()}):
        cpus = scaling.num_cpus_per_worker or len(visible[sharers[0]].cpus) / len(sharers)
        threads |= dict.fromkeys(sharers, max(1, math.floor(cpus)))
    return {index: Share(gpus[index], threads[index]) for index in visible}


def _groups(keys: Mapping[int, Hashable]) -> list[list[int]]:
    """Return the indices with equal keys together, in the order of the indices."""
    groups = defaultdict(list)
    for index in sorted(keys):
        groups[keys[index]].append(index)
    return list(groups.values())


def _divide_gpus(
    each: float, sharers: Sequence[int], visible: VisibleDevices, may_be_confined: bool
) -> dict[int, tuple[str, ...]]:
    """Return the GPUs of workers that see the same GPUs."""
    gpus, count = visible.gpus, max(1, int(each))
    if may_be_confined and len(gpus) == count:
        return dict.fromkeys(sharers, gpus)
    per_gpu = math.floor(1 / each + 1e-9) if each < 1 else 1
    needed = math.ceil(len(sharers) / per_gpu) * count
    if needed > len(gpus):
        raise ResourceError(
            f"[DT-301] {len(sharers)} workers with {each:g} GPUs each require {needed} GPUs on node "
            f"{visible.node_id!r}, where they can use {len(gpus)} ({', '.join(gpus) or 'none'}). Request GPUs with the "
            "options of the command, set a smaller num_workers, or set use_gpu=False"
        )
    parts = [number // per_gpu * count for number in range(len(sharers))]
    return {index: gpus[start : start + count] for index, start in zip(sharers, parts, strict=True)}
