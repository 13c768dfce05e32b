"""Facts about a process that holds a lock: which one it is, and whether it is still running."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from drivetrain._storage.reading import Fields, parse_json
from drivetrain.errors import StorageError

__all__ = ["boot_id", "describe", "is_on_this_machine", "is_running", "own_facts", "parse"]

_MAX_PID = 1 << 31


def own_facts() -> dict[str, Any]:
    """Return facts about this process, which can be stored as JSON."""
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def parse(data: bytes | None, name: str) -> dict[str, Any]:
    """Parse stored facts. Return {} if there are none, or if they are damaged.

    Args:
        data: the content of a file; None without one.
        name: the name of the file.
    """
    try:
        facts = Fields(parse_json(data or b"", name), name)
        if not 0 < facts.integer("pid") < _MAX_PID:
            return {}
        facts.text("host")
        facts.text("since")
        return facts.values
    except StorageError:
        return {}


def describe(facts: dict[str, Any]) -> str:
    """Return facts about a process as text for messages."""
    if "pid" not in facts:
        return "another process"
    return f"process {facts['pid']} on {facts['host']} (since {facts['since']})"


def is_on_this_machine(facts: dict[str, Any]) -> bool:
    """Return True if a process is or was on this machine, since its last boot and in the same PID namespace."""
    return facts.get("machine") == machine()


def is_running(facts: dict[str, Any]) -> bool:
    """Return True if a process on this machine is running."""
    started = _started(int(facts["pid"]))
    return started is not None and started == facts.get("started")


def boot_id(facts: dict[str, Any]) -> str:
    """Return the id of the boot of the process's machine. All containers of a machine have the same."""
    return str(facts.get("machine", "")).partition("/")[0]


def machine() -> str:
    """Return an id of this machine's current boot and of this process's PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since the boot, or None if the process is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
