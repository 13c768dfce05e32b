"""Finds and kills the processes of a job by an environment variable that all of them inherit. It reads ``/proc``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["command_of", "kill", "kill_marked", "marked_processes"]

_KILLING_S = 10.0


def marked_processes(variable: str, value: str) -> dict[int, int]:
    """Map the process id of each running process with this environment variable to the process id of its parent."""
    mark = f"{variable}={value}"
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and mark in _read(f"/proc/{entry}/environ").split("\0"):
            fields = _read(f"/proc/{entry}/stat").rpartition(")")[2].split()
            if fields and fields[0] not in "ZX":
                parents[int(entry)] = int(fields[1])
    return parents


def kill_marked(variable: str, value: str) -> int:
    """Kill all these processes, including those that start in the meantime. Return their number."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILLING_S
    while (remaining := marked_processes(variable, value)) and time.monotonic() < deadline:
        for pid in remaining:
            kill(pid)
        killed.update(remaining)
    return len(killed)


def kill(pid: int) -> None:
    """Send SIGKILL to a process, which may have exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has exited."""
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ")


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:  # the process has exited, or belongs to another user
        return ""
