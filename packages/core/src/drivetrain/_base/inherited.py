"""The settings of the system that a process inherits from the process that starts it."""

from __future__ import annotations

import os
import resource
import signal

__all__ = ["inherited_settings"]


def inherited_settings() -> object:
    """Return limits, priority, users, signals and groups of this process, for a comparison with those of another."""
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        (sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        (os.getresuid(), os.getresgid(), os.getgroups(), blocked, sorted(ignored)),
        [_read(f"/proc/self/{name}") for name in ("cgroup", "oom_score_adj")],
    )


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
