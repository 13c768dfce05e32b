"""The place of each process in one or several TPU slices, from the variables that the platform sets on TPU hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from drivetrain import ConfigurationError

__all__ = ["process_ids", "tpu_variables"]

_SLICE, _SLICES = "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"
_NAMES = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID", _SLICE, _SLICES)


def tpu_variables() -> dict[str, str]:
    """Return the variables of this process that describe its place; an empty dict on a machine without TPUs."""
    return {name: os.environ[name] for name in _NAMES if os.environ.get(name)}


def process_ids(found: Sequence[Mapping[str, str]]) -> list[int]:
    """Return JAX's process id for each rank.

    On TPUs, the hardware determines the ids, so they can differ from the ranks: slice by slice, in the order of the
    hosts in ``TPU_WORKER_HOSTNAMES``, or of the processes in ``TPU_PROCESS_ADDRESSES`` if a host runs several.

    Args:
        found: the result of :func:`tpu_variables` on each rank.

    Raises:
        ConfigurationError: the workers are not exactly the processes of the slices. TPUs would wait for the others.
    """
    if not any("TPU_WORKER_ID" in variables or "CLOUD_TPU_TASK_ID" in variables for variables in found):
        return list(range(len(found)))
    ids, expected = [], 0
    for variables in found:
        own = variables.get("CLOUD_TPU_TASK_ID", variables.get("TPU_WORKER_ID", "0"))
        peers = variables.get("TPU_PROCESS_ADDRESSES", variables.get("TPU_WORKER_HOSTNAMES", "")).split(",")
        ids.append(int(variables.get(_SLICE, 0)) * len(peers) + int(own))
        expected = max(expected, int(variables.get(_SLICES, 1)) * len(peers))
    if sorted(ids) != list(range(expected)):
        raise ConfigurationError(
            f"the jax backend: expected one worker for each of the {expected} TPU processes (TPU_WORKER_HOSTNAMES, "
            f"{_SLICES}), got {len(found)} workers on the processes {sorted(ids)}. Set "
            f"ScalingConfig(num_workers={expected}) and place one worker on each host. To train on CPUs, set "
            'JaxConfig(platform="cpu")'
        )
    return ids
