"""Records the CPU time and memory of the workers on the driver's machine every few seconds.

The driver reads ``/proc`` for the workers on its own machine; the workers do nothing. A sample takes tens of
microseconds per worker. The interval between samples grows with the duration of the attempt, which limits the number of
samples to a few thousand.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain._storage.layout import USAGE_FILE, run_file

if TYPE_CHECKING:
    from drivetrain._hooks.context import WorkerInfo

__all__ = ["UsageRecorder"]

_DELAY_S = 0.1
_FIRST_PERIOD_S = 1.0
_SHARE_OF_AGE = 0.005
_MAX_PROCESSES = 512
_STOP_WAIT_S = 2.0


class UsageRecorder:
    """Appends the resource usage of the local workers of an attempt to ``usage.jsonl``, from a separate thread.

    A line is ``{"time": ..., "ranks": {"0": [CPUs, bytes, processes], ...}}``. For each rank, it contains the mean
    number of CPUs that the worker and its child processes have used since the previous line, their resident memory, and
    the number of these processes. Shared memory is counted once per process.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, directory: Path, workers: Sequence[WorkerInfo]) -> None:
        """Start recording the workers of an attempt that run on this machine, but not in this process."""
        self.stop()
        own_host = socket.gethostname()
        pids = {worker.rank: worker.pid for worker in workers if worker.hostname == own_host}
        pids = {rank: pid for rank, pid in pids.items() if pid != os.getpid() and os.path.exists(f"/proc/{pid}")}
        if not pids:
            return
        self._stopped = threading.Event()
        thread = threading.Thread(
            target=_record, args=(directory / USAGE_FILE, pids, self._stopped), daemon=True, name="drivetrain usage"
        )
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Stop recording."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join(_STOP_WAIT_S)
            self._thread = None


def _record(path: Path, pids: dict[int, int], stopped: threading.Event) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, run_file(USAGE_FILE).mode)
        try:
            # Without the delay, this thread would compete for the GIL with the start of the attempt.
            if not stopped.wait(_DELAY_S):
                _sample_until(stopped, descriptor, pids)
        finally:
            os.close(descriptor)


def _sample_until(stopped: threading.Event, descriptor: int, pids: dict[int, int]) -> None:
    started = previous_at = time.monotonic()
    previous = {rank: _usage(pid) for rank, pid in pids.items()}
    while not stopped.wait(max(_FIRST_PERIOD_S, (time.monotonic() - started) * _SHARE_OF_AGE)):
        now_at = time.monotonic()
        now = {rank: _usage(pid) for rank, pid in pids.items()}
        ranks = {}
        for rank, (cpu_s, memory, count) in now.items():
            if count:
                cpus = max(0.0, cpu_s - previous[rank][0]) / (now_at - previous_at)
                ranks[str(rank)] = [round(cpus, 2), memory, count]
        if not ranks:
            return  # all workers have exited
        os.write(descriptor, json.dumps({"time": round(time.time(), 2), "ranks": ranks}).encode() + b"\n")
        previous, previous_at = now, now_at


def _usage(pid: int) -> tuple[float, int, int]:
    """Return the CPU seconds and resident bytes of a process and its descendants, and the number of these processes."""
    cpu_ticks = pages = count = 0
    pending = [pid]
    while pending and count < _MAX_PROCESSES:
        process = pending.pop()
        try:
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            # Includes the time of exited children, which would otherwise disappear from the sum.
            cpu_ticks += sum(map(int, stat[11:15]))
            pages += int(stat[21])
            count += 1
            # Only the children of the main thread, which starts the data loaders: reading all threads is expensive.
            pending += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except (OSError, ValueError, IndexError):
            continue
    return cpu_ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"), count
