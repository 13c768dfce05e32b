"""What this machine has, which part of it each worker gets, and the order of a cluster's nodes and their GPUs."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from drivetrain.config import ScalingConfig
from drivetrain.errors import ResourceError

__all__ = ["OomCounter", "order_gpus", "order_nodes", "partition_gpus", "threads_per_worker", "visible_gpus"]

_CGROUPS = Path("/sys/fs/cgroup")
_DEVICES = Path("/dev")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> list[str]:
    """The GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; CUDA ends the list at a ``-1``.

    Without that variable they are as many as there are device files: a container that has only one of a machine's
    has ``nvidia3``, and CUDA calls it 0.
    """
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        names = itertools.takewhile(lambda name: name != "-1", map(str.strip, allowed.split(",")))
        return [name for name in names if name]
    files = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(index) for index in range(len(files))]


def partition_gpus(scaling: ScalingConfig, gpus: list[str]) -> list[tuple[str, ...]]:
    """The GPUs of each local worker. Workers with a fraction share one, as many as fit on it.

    Args:
        scaling: how many workers, and how many GPUs each.
        gpus: the GPUs there are.

    Raises:
        ResourceError: there are too few.
    """
    each, workers = scaling.num_gpus_per_worker, scaling.max_workers
    if each == 0:
        return [()] * workers
    if each < 1:
        sharers = math.floor(1 / each + 1e-9)
        needed = math.ceil(workers / sharers)
        parts = [gpus[rank // sharers : rank // sharers + 1] for rank in range(workers)]
    else:
        if each != int(each):
            raise ResourceError(f"GPUs per worker: expected a whole number or a fraction below 1, got {each}")
        whole = int(each)
        needed = whole * workers
        parts = [gpus[rank * whole : (rank + 1) * whole] for rank in range(workers)]
    if needed > len(gpus):
        found = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        raise ResourceError(
            f"{workers} workers with {each:g} GPUs each require {needed} GPUs on this machine, which has {found}: "
            "ask for fewer workers, set use_gpu=False, or connect to a Ray cluster that has them"
        )
    return [tuple(part) for part in parts]


def order_nodes(nodes: Collection[str], here: str, before: Sequence[str]) -> list[str]:
    """The order in which nodes get their ranks: those of the group before keep their places.

    Args:
        nodes: the ids of the group's nodes.
        here: the id of the driver's own, which comes first among new ones.
        before: the order in the run's last group. New nodes take the places of those that are lost, then the end.
    """
    new = iter(sorted(set(nodes) - set(before), key=lambda node: (node != here, node)))
    kept = [node if node in nodes else next(new, None) for node in before]
    return [node for node in kept if node is not None] + list(new)


def order_gpus(gpus: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """A key that sorts workers by their GPUs: 9 comes before 10, and a UUID where its text does."""
    return tuple((len(gpu), gpu) for gpu in gpus)


def threads_per_worker(scaling: ScalingConfig) -> int:
    """How many threads a local worker should start with: its CPUs, or an even share of the machine's."""
    asked = scaling.num_cpus_per_worker
    if asked is not None:
        return max(1, int(asked))
    return max(1, len(os.sched_getaffinity(0)) // max(1, scaling.max_workers))


class OomCounter:
    """Tells whether the kernel has ended processes because memory ran out, in this process's memory group if it can."""

    def __init__(self) -> None:
        self._file = next((path for path in _oom_files() if _read_oom_kills(path) is not None), None)
        self._seen = self._count()

    def rose(self) -> bool:
        """Whether there were any since the last call, or since this was made."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        return (_read_oom_kills(self._file) if self._file is not None else None) or 0


def _oom_files() -> Iterator[Path]:
    """Where the count may be: of the process's control group, of version 2 or 1, and of the machine."""
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
