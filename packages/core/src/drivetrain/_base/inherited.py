"""The settings of the system that a process inherits from the process that starts it."""

from __future__ import annotations

import os

__all__ = ["inherited_settings"]

_LINES = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:", "Cpus_allowed:", "Mems_allowed:", "SigBlk", "SigIgn")


def inherited_settings(pid: int | None = None) -> list[object]:
    """Return limits, priority, user, rights, signals and groups of a process, for a comparison with another one.

    Args:
        pid: the process; None for this one.

    Raises:
        OSError: the process has ended, or its settings cannot be read.
    """
    place = f"/proc/{pid or 'self'}"
    root = os.stat(f"{place}/root")
    return [
        [line for line in _read(f"{place}/status").split("\n") if line.startswith(_LINES)],
        [_read(f"{place}/{name}") for name in ("limits", "cgroup", "oom_score_adj", "personality")],
        [os.readlink(f"{place}/ns/{name}") for name in sorted(os.listdir(f"{place}/ns"))],
        [root.st_dev, root.st_ino],
        [os.getpriority(os.PRIO_PROCESS, pid or 0), os.sched_getscheduler(pid or 0)],
        [os.sched_getparam(pid or 0).sched_priority],
    ]


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
