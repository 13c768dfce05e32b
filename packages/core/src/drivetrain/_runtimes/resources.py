"""The resources of this machine, their division among workers, and the order of a cluster's nodes and GPUs."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from drivetrain.config import ScalingConfig
from drivetrain.errors import FailureKind, ResourceError

__all__ = [
    "OomCounter",
    "accelerator_sort_key",
    "explain_exit",
    "gpus_are_selected",
    "order_nodes",
    "partition_gpus",
    "required_gpus",
    "threads_per_worker",
    "usable_cpus",
    "visible_gpus",
    "workers_that_fit",
]

_CGROUPS = Path("/sys/fs/cgroup")
_DEVICES = Path("/dev")


_GPU_ID = re.compile(r"\d+|(GPU|MIG)-.+")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> list[str]:
    """Return the ids of the GPUs that this process can use, as in ``CUDA_VISIBLE_DEVICES``.

    Like CUDA, ignore the entries of that variable from the first one on that is no GPU, such as ``-1``, ``none`` or
    Slurm's ``NoDevFiles``. Without the variable, number the GPUs from 0, because
    the numbers of device files may differ: the only GPU of a container may be ``nvidia3``, but CUDA calls it 0.
    """
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return list(itertools.takewhile(_GPU_ID.fullmatch, map(str.strip, allowed.split(","))))
    files = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(index) for index in range(len(files))]


def gpus_are_selected() -> bool:
    """Return True if the user, or a batch system, has selected GPUs for this process."""
    return "CUDA_VISIBLE_DEVICES" in os.environ


def partition_gpus(scaling: ScalingConfig, gpus: list[str]) -> list[tuple[str, ...]]:
    """Return the GPUs of each local worker. Workers that need only a fraction of a GPU share GPUs.

    Args:
        scaling: contains the number of workers and the number of GPUs per worker.
        gpus: the ids of the available GPUs.

    Raises:
        ResourceError: there are too few GPUs.
    """
    each, workers, needed = scaling.num_gpus_per_worker, scaling.max_workers, required_gpus(scaling)
    if each == 0:
        return [()] * workers
    if each < 1:
        sharers = _sharers(each)
        parts = [gpus[rank // sharers : rank // sharers + 1] for rank in range(workers)]
    else:
        whole = int(each)
        parts = [gpus[rank * whole : (rank + 1) * whole] for rank in range(workers)]
    if needed > len(gpus):
        available = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        if (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            available += f" with CUDA_VISIBLE_DEVICES={allowed!r}"
        asked = f"{workers} worker{'s' * (workers != 1)} with {each:g} GPU{'s' * (each != 1)} each"
        remedy = "Set a smaller num_workers, set use_gpu=False" if gpus else "Set use_gpu=False"
        raise ResourceError(
            f"[DT-301] {asked} require {needed} GPUs on this machine, which has {available}. {remedy}, or connect to a "
            "Ray cluster with enough GPUs"
        )
    return [tuple(part) for part in parts]


def required_gpus(scaling: ScalingConfig) -> int:
    """Return the number of GPUs that local workers need. Workers that need only a fraction of a GPU share GPUs.

    Raises:
        ResourceError: a worker needs a number of GPUs that is neither whole nor below 1.
    """
    each, workers = scaling.num_gpus_per_worker, scaling.max_workers
    if 0 < each < 1:
        return math.ceil(workers / _sharers(each))
    if each != int(each):
        raise ResourceError(f"[DT-302] GPUs per worker: expected a whole number or a fraction below 1, got {each}")
    return int(each) * workers


def workers_that_fit(scaling: ScalingConfig, gpus: int) -> int:
    """Return the number of local workers for which a number of GPUs suffices; the maximum number without GPUs."""
    each = scaling.num_gpus_per_worker
    if each == 0:
        return scaling.max_workers
    return _sharers(each) * gpus if each < 1 else gpus // int(each)


def _sharers(fraction: float) -> int:
    """Return the number of workers that share a GPU if each of them needs a fraction of one."""
    return math.floor(1 / fraction + 1e-9)


def order_nodes(nodes: Collection[str], first_node: str, previous_nodes: Sequence[str]) -> list[str]:
    """Return the ids of nodes in the order of their ranks. Nodes of the previous group keep their order.

    Args:
        nodes: the ids of the group's nodes.
        first_node: the id of the node that precedes all other new nodes, usually the driver's node.
        previous_nodes: the ids of the nodes of the run's previous group, in order. New nodes take the places of lost
            nodes; the remaining new nodes follow at the end.
    """
    new = iter(sorted(set(nodes) - set(previous_nodes), key=lambda node: (node != first_node, node)))
    kept = [node if node in nodes else next(new, None) for node in previous_nodes]
    return [node for node in kept if node is not None] + list(new)


def accelerator_sort_key(ids: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Return a sort key for a worker's accelerators of one kind. It sorts numbers by value, and UUIDs as text."""
    return tuple((len(each), each) for each in ids)


def threads_per_worker(scaling: ScalingConfig) -> int:
    """Return the number of threads for a local worker: its CPUs, or an equal share of the machine's CPUs."""
    cpus = scaling.num_cpus_per_worker
    if cpus is not None:
        return max(1, int(cpus))
    return max(1, usable_cpus() // max(1, scaling.max_workers))


def usable_cpus(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many CPUs this process may use: those of its affinity, unless the quota of a cgroup is smaller.

    A container that was started with ``--cpus=4`` has such a quota, and sees all CPUs of the machine.
    """
    available = len(os.sched_getaffinity(0))
    quotas = [quota for quota in _cpu_quotas(cgroups, own) if quota is not None]
    return max(1, min([available, *map(math.floor, quotas)]))


class OomCounter:
    """Counts processes that the kernel killed because memory ran out.

    The count is that of this process's control group if available, and otherwise that of the machine.
    """

    def __init__(self) -> None:
        self._file = next((path for path in _oom_files() if _read_oom_kills(path) is not None), None)
        self._seen = self._count()

    def has_increased(self) -> bool:
        """Return True if the count rose since the last call or, in the first call, since the object was created."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        return (_read_oom_kills(self._file) if self._file is not None else None) or 0


def explain_exit(exit_code: int, oom_kills: OomCounter) -> tuple[str, FailureKind]:
    """Return why a process on this machine was killed, empty if unknown, and the category of the failure."""
    if exit_code == -signal.SIGKILL and oom_kills.has_increased():
        return "was killed by the kernel because memory ran out (SIGKILL)", FailureKind.OUT_OF_MEMORY
    if exit_code == -signal.SIGTERM:  # batch systems and clouds stop processes with this signal
        return "", FailureKind.PREEMPTION
    return "", FailureKind.INFRASTRUCTURE


def _cpu_quotas(cgroups: Path, own: Path) -> Iterator[float | None]:
    """Yield the quotas, in CPUs, of this process's control group (version 2 or 1) and of the groups above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        base = cgroups if number == "0" else cgroups / "cpu"
        group = Path(path)
        for directory in (group, *group.parents):
            place = base / str(directory).lstrip("/")
            yield (
                _quota(place / "cpu.max")
                if number == "0"
                else _quota(place / "cpu.cfs_quota_us", place / "cpu.cfs_period_us")
            )


def _quota(*files: Path) -> float | None:
    """Return the quota, as a number of CPUs, in a file with both numbers, or in a file for each; None without one."""
    try:
        quota, period = " ".join(file.read_text().strip() for file in files).split()
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" means no quota
        return None


def _oom_files() -> Iterator[Path]:
    """Yield files that may contain the count: of the process's control group (version 2 or 1), then of the machine."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield _CGROUPS / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
    yield Path("/proc/vmstat")


def _read_oom_kills(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
