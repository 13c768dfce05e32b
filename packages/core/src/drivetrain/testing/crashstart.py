"""One start of the job that the crash harness works on, and the crashes that happen in it."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain._base.crashpoints import ADDRESS, POINTS
from drivetrain.errors import ConfigurationError

__all__ = ["VICTIMS", "Crash", "JobSpec", "JobStart"]

VICTIMS = ("driver", "worker", "workers", "both")
"""Whom a crash ends: the driver; the worker that is at the point, or any; all workers; everything that runs."""

_MARK = "DRIVETRAIN_CRASH_MARK"
_END_S = 10.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Crash:
    """When to end whom.

    Attributes:
        victim: one of :data:`VICTIMS`.
        point: the point of the protocol, one of :data:`POINTS`; None for a moment instead.
        occurrence: the how-manieth time that any process comes to the point, from 1.
        after_s: the moment: seconds after the start, or after the crash before if that has left the driver alive.

    Raises:
        ConfigurationError: there are both a point and a moment or none, or one of the names is unknown.
    """

    victim: str = "driver"
    point: str | None = None
    occurrence: int = 1
    after_s: float | None = None

    def __post_init__(self) -> None:
        if self.victim not in VICTIMS:
            raise ConfigurationError(f"Crash(victim=...): expected one of {', '.join(VICTIMS)}, got {self.victim!r}")
        if (self.point is None) == (self.after_s is None):
            raise ConfigurationError(
                f"Crash: expected either a point or a moment, got point={self.point!r}, after_s={self.after_s}"
            )
        if self.point is not None and self.point not in POINTS:
            raise ConfigurationError(f"Crash(point=...): expected one of {', '.join(POINTS)}, got {self.point!r}")

    def __str__(self) -> str:
        when = f"after {self.after_s:.3f} s" if self.after_s is not None else f"{self.point}, time {self.occurrence}"
        return f"{self.victim} {when}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The job that a harness crashes.

    Attributes:
        command: starts its driver.
        environment: further variables of the driver.
        storage_path: where it keeps its runs.
        name: the name of the run.
        metrics: the metrics that have to be those of an undisturbed run; None for all.
        same_files: whether the files of the last checkpoint have to be the same too.
        deadline_s: seconds that one start may take.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    storage_path: str
    name: str
    metrics: frozenset[str] | None
    same_files: bool
    deadline_s: float


class JobStart:
    """One start of the job: its driver, and everything that this has started and that inherits its environment.

    Args:
        job: what to start.
        variables: of this start.
        output: the file that takes its output.
        armed: its processes tell when they come to a point, and wait there.
    """

    def __init__(self, job: JobSpec, variables: Mapping[str, str], output: Path, *, armed: bool) -> None:
        self.killed: list[int] = []
        self.driver_was_killed = False
        self.seconds = 0.0
        self._deadline_s = job.deadline_s
        self._output = output
        self._armed = armed
        self._mark = secrets.token_hex(8)
        self._waiting: deque[Crash] = deque()
        self._reached = 0
        self._environment = {**os.environ, **job.environment, **variables, _MARK: self._mark}
        self._environment.pop(ADDRESS, None)
        self._command = job.command

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def play(self, waiting: deque[Crash]) -> list[str]:
        """Runs it to the end of its driver, and takes the crashes that have happened from those that wait.

        Returns:
            What was not as it has to be.
        """
        self._waiting = waiting
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            if self._armed:
                address = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='drivetrain-crash-'))}/points"
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(address)
                listener.listen(128)
                self._environment[ADDRESS] = address
                selector.register(listener, selectors.EVENT_READ, lambda: self._take(listener, selector, stack))
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ended = os.pidfd_open(self._process.pid)
            stack.callback(os.close, ended)
            selector.register(ended, selectors.EVENT_READ, lambda: None)
            try:
                return self._follow(selector)
            except BaseException:
                self._kill_all()
                raise

    def close(self) -> list[str]:
        """Waits until nothing runs any more; what does all the same is ended, and told."""
        deadline = time.monotonic() + _END_S
        while left := self._processes():
            if time.monotonic() > deadline:
                commands = [_read(f"/proc/{pid}/cmdline").replace("\0", " ") for pid in left]
                self._kill_all()
                return [f"still running {_END_S:g} s after their driver: {commands}"]
            time.sleep(_LOOK_S)
        return []

    def _follow(self, selector: selectors.BaseSelector) -> list[str]:
        began = since = time.monotonic()
        deadline = began + self._deadline_s
        while self._process.poll() is None:
            now = time.monotonic()
            if now > deadline:
                self._kill_all()
                self.driver_was_killed = True
                return [f"the job had not ended {self._deadline_s:g} s after its start"]
            moment = deadline
            if self._waiting and self._waiting[0].after_s is not None and not self.driver_was_killed:
                moment = since + self._waiting[0].after_s
                if now >= moment:
                    self._strike(self._waiting.popleft())
                    since = now
                    continue
            for key, _ in selector.select(max(0.0, min(moment, deadline) - now)):
                key.data()
        self.seconds = time.monotonic() - began
        if self._process.returncode and not self.driver_was_killed:
            last = "\n".join(self.output.splitlines()[-20:])
            return [f"the job ended with status {self._process.returncode}:\n{last}"]
        return []

    def _take(self, listener: socket.socket, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
        line, _ = listener.accept()
        stack.callback(line.close)
        selector.register(line, selectors.EVENT_READ, lambda: self._hear(line, selector))

    def _hear(self, line: socket.socket, selector: selectors.BaseSelector) -> None:
        """A process has come to a point: this is the moment, or it may go on."""
        selector.unregister(line)
        with contextlib.suppress(ConnectionError):
            pid, _, point = line.recv(1000).decode().strip().partition(" ")
            if self._waiting and self._waiting[0].point == point and not self.driver_was_killed:
                self._reached += 1
                if self._reached == self._waiting[0].occurrence:
                    self._reached = 0
                    self._strike(self._waiting.popleft(), int(pid))
            line.sendall(b".")

    def _strike(self, crash: Crash, at_point: int | None = None) -> None:
        if crash.victim == "both":
            self.killed.append(self._kill_all())
        else:
            victims = self._choose(crash.victim, at_point)
            for pid in victims:
                _kill(pid)
            self.killed.append(len(victims))
        self.driver_was_killed = crash.victim in ("driver", "both")

    def _choose(self, victim: str, at_point: int | None) -> list[int]:
        driver = self._process.pid
        if victim == "driver":
            return [driver]
        processes = self._processes()
        servers = {pid for pid, parent in processes.items() if parent == driver}
        workers = sorted(pid for pid, parent in processes.items() if parent in servers)
        if victim == "workers" or not workers:
            return workers
        return [at_point if at_point in workers else random.choice(workers)]

    def _processes(self) -> dict[int, int]:
        """What runs, each with its parent."""
        mark = f"{_MARK}={self._mark}"
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and mark in _read(f"/proc/{entry}/environ").split("\0"):
                fields = _read(f"/proc/{entry}/stat").rpartition(")")[2].split()
                if fields and fields[0] not in "ZX":
                    found[int(entry)] = int(fields[1])
        return found

    def _kill_all(self) -> int:
        """Ends everything, also what is started meanwhile; returns how many that were."""
        ended: set[int] = set()
        deadline = time.monotonic() + _END_S
        while (left := self._processes()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            ended.update(left)
        return len(ended)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""
