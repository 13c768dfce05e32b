"""Checks that a run, or the code of a plugin, has left no thread, process or temporary file in the driver."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from drivetrain_testing._leftovers import exits

__all__ = ["assert_nothing_left"]

_END_S = 10.0


@contextlib.contextmanager
def assert_nothing_left(directory: Path, *, of: str) -> Iterator[None]:
    """Check that no thread, child process or temporary file that was created in the ``with`` block outlives it.

    Threads and processes have a few seconds to end.

    Args:
        directory: a new directory, which becomes the directory of temporary files.
        of: the plugin, as the subject of messages.

    Raises:
        AssertionError: something is left. The message names it.
    """
    directory.mkdir(parents=True)
    before, threads, processes = tempfile.tempdir, set(threading.enumerate()), _children()
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before
    deadline = time.monotonic() + _END_S
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{of} left the thread {thread.name!r} running. End it in on_run_end()"
    for pid in _children() - processes:
        command = _command(pid)
        remaining_s = deadline - time.monotonic()
        assert exits(pid, remaining_s), f"{of} left the process {pid} running: {command}. End it in on_run_end()"
    files = sorted(path.name for path in directory.iterdir())
    assert not files, f"{of} left temporary files: {', '.join(files)}. Delete them in on_run_end()"


def _children() -> set[int]:
    """Return the ids of the running child processes of this process."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            children.update(map(int, (task / "children").read_text().split()))
    return children


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "unknown command"
