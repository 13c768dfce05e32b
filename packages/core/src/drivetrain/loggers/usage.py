"""What the workers of a run use, as the driver's machine sees it: CPU time and memory, noted every few seconds.

The driver reads ``/proc`` for the workers that run on its own machine, and nothing is done in a worker. Each sample
costs tens of microseconds a worker; the time between two grows with the age of the run, so that there are some
thousands of them however long it takes.
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

from drivetrain._storage.layout import USAGE_FILE

if TYPE_CHECKING:
    from drivetrain._hooks.context import WorkerInfo

__all__ = ["UsageRecorder"]

_FIRST_PERIOD_S = 1.0
_SHARE_OF_AGE = 0.005
_MAX_PROCESSES = 512
_STOP_WAIT_S = 2.0


class UsageRecorder:
    """Appends to ``usage.jsonl``, from a thread of its own, what the local workers of an attempt use.

    A line is ``{"time": ..., "ranks": {"0": [CPUs, bytes, processes], ...}}``: how many CPUs the worker and the
    processes that it started have kept busy since the line before, and their resident memory. Memory that they share
    is counted for each of them.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, directory: Path, workers: Sequence[WorkerInfo]) -> None:
        """Begins with the workers of an attempt, as far as they are on this machine and not this process."""
        self.stop()
        own_host = socket.gethostname()
        pids = {worker.rank: worker.pid for worker in workers if worker.hostname == own_host}
        pids = {rank: pid for rank, pid in pids.items() if pid != os.getpid() and os.path.exists(f"/proc/{pid}")}
        if not pids:
            return
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_record, args=(directory / USAGE_FILE, pids, self._ended), daemon=True, name="drivetrain usage"
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join(_STOP_WAIT_S)
            self._thread = None


def _record(path: Path, pids: dict[int, int], ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _sample_until(ended, descriptor, pids)
        finally:
            os.close(descriptor)


def _sample_until(ended: threading.Event, descriptor: int, pids: dict[int, int]) -> None:
    started = before_at = time.monotonic()
    before = {rank: _usage(pid) for rank, pid in pids.items()}
    while not ended.wait(max(_FIRST_PERIOD_S, (time.monotonic() - started) * _SHARE_OF_AGE)):
        now_at = time.monotonic()
        now = {rank: _usage(pid) for rank, pid in pids.items()}
        ranks = {}
        for rank, (cpu_s, memory, count) in now.items():
            if count:
                cpus = max(0.0, cpu_s - before[rank][0]) / (now_at - before_at)
                ranks[str(rank)] = [round(cpus, 2), memory, count]
        if not ranks:
            return  # they have ended
        os.write(descriptor, json.dumps({"time": round(time.time(), 2), "ranks": ranks}).encode() + b"\n")
        before, before_at = now, now_at


def _usage(pid: int) -> tuple[float, int, int]:
    """CPU seconds, resident bytes and number of a process and of those that it started."""
    cpu_ticks = pages = count = 0
    pending = [pid]
    while pending and count < _MAX_PROCESSES:
        process = pending.pop()
        try:
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            # Of its ended children too, whose time would otherwise vanish from the sum.
            cpu_ticks += sum(map(int, stat[11:15]))
            pages += int(stat[21])
            count += 1
            # Those of its main thread, which starts data loaders: a look at each of a hundred threads would cost more.
            pending += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except (OSError, ValueError, IndexError):
            continue
    return cpu_ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"), count
