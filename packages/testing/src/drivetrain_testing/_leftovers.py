"""Compares the state of a process before and after code that must clean up after itself.

The conformance kits use it in the driver and in workers. It reads ``/proc``, so it requires Linux.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessState", "exits"]

_END_S = 2.0
"""Seconds that a thread or child process has to end, because code that stops it may not wait for its end."""

_OUR_THREADS = ("drivetrain ", "drivetrain-output")  # and not those of a plugin whose name begins with "drivetrain-"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """The parts of a process that could be left over.

    Attributes:
        variables: the environment variables.
        threads: the Python threads, except for those of drivetrain.
        children: the process ids of the children.
        sockets: the inodes of the open sockets.
        files: the names in the temporary directory.
    """

    variables: Mapping[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    sockets: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the current state of this process."""
        return cls(
            variables=dict(os.environ),
            threads=frozenset(each for each in threading.enumerate() if not each.name.startswith(_OUR_THREADS)),
            children=frozenset(_children()),
            sockets=frozenset(_sockets()),
            files=frozenset(os.listdir(tempfile.gettempdir())),
        )

    def changes(self, *, in_run: bool, started: ProcessState | None = None) -> list[str]:
        """Describe what this process has now, but did not have in this state.

        Args:
            in_run: True if a run may have opened or closed its own sockets and files meanwhile; they are then ignored.
            started: a later state. If given, threads and child processes that it does not have are ignored: the run has
                started them.
        """
        now = ProcessState.now()
        threads, children = now.threads - self.threads, now.children - self.children
        if started is not None:
            threads, children = threads & started.threads, children & started.children
        names = sorted(self.variables.keys() | now.variables.keys())
        found = [
            f"the environment variable {name} ({self.variables.get(name)!r} before, {now.variables.get(name)!r} now)"
            for name in names
            if self.variables.get(name) != now.variables.get(name)
        ]
        found += [f"the thread {thread.name!r}" for thread in threads if _runs(thread)]
        found += [f"the child process {pid}" for pid in sorted(children) if not exits(pid, _END_S)]
        if not in_run:
            if new := now.sockets - self.sockets:
                found.append(f"{len(new)} open socket{'s' if len(new) > 1 else ''}")
            found += [f"the file {name} in the temporary directory" for name in sorted(now.files - self.files)]
        return found


def exits(pid: int, seconds: float) -> bool:
    """Wait at most this time for a process, and return True if it has exited. A zombie counts as exited."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])
    finally:
        os.close(descriptor)


def _runs(thread: threading.Thread) -> bool:
    thread.join(_END_S)
    return thread.is_alive()


def _children() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # the process has exited
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state not in "ZX":
                    yield int(entry.name)


def _sockets() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the descriptor of this listing
            target = os.readlink(entry)
            if target.startswith("socket:"):
                yield target
