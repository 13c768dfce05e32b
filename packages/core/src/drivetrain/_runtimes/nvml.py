"""The processes that use the GPUs of this machine, as NVIDIA's management library (NVML) reports them.

The Python package ``nvidia-ml-py`` is optional. Without it, only the GPUs of drivetrain's own runs are known.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pwd
from collections.abc import Sequence
from typing import Any

__all__ = ["other_processes"]


def other_processes(gpus: Sequence[str]) -> dict[str, str]:
    """Return a description of the processes that compute on each GPU, without this process; {} if NVML is not usable.

    Args:
        gpus: the ids of GPUs, as in ``CUDA_VISIBLE_DEVICES``.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # it is not installed, or there is no driver: the library has an exception class for each error
        return {}
    try:
        found = {}
        for gpu in gpus:
            with contextlib.suppress(Exception):  # a partition (MIG), or a GPU that this container may not see
                by_index = gpu.isdecimal()
                handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_index else nvml.nvmlDeviceGetHandleByUUID(gpu)
                processes = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                described = [text for pid in processes if pid != os.getpid() and (text := _describe(pid))]
                if described:
                    found[gpu] = ", ".join(described)
        return found
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _describe(pid: int) -> str:
    """Return a process and its user as text; empty if this process cannot see it, as in a container."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        return f"process {pid} of {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"process {pid} of user {uid}"
