"""One start of the crash harness's job, and the crashes during this start."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import selectors
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain import ConfigurationError
from drivetrain.plugin.checks import ADDRESS, POINTS, socket_address
from drivetrain_testing._leftovers import exits
from drivetrain_testing._marked import command_of, kill, kill_marked, marked_processes

__all__ = ["VICTIMS", "Crash", "JobSpec", "JobStart"]

VICTIMS = ("driver", "worker", "workers", "both")
"""The processes that a crash can kill; ``"both"`` kills the driver and all workers.

``"worker"`` kills the worker that has reached the crash's point, or a random worker if no worker has reached it.
"""

_MARK = "DRIVETRAIN_CRASH_MARK"
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Crash:
    """Which processes to kill, and when: at a point of the storage protocol, or after some time.

    Attributes:
        victim: the processes to kill, one of :data:`VICTIMS`.
        point: the point of the storage protocol, one of :data:`POINTS`; None to use ``after_s``.
        occurrence: kill when the point is reached for the n-th time, counted over all processes from 1.
        after_s: seconds after the start of the job, or after the previous crash if that did not kill the driver.

    Raises:
        ConfigurationError: ``point`` and ``after_s`` are both set or both unset, or a name is unknown.
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
                f"Crash: expected either point or after_s, got point={self.point!r}, after_s={self.after_s}"
            )
        if self.point is not None and self.point not in POINTS:
            raise ConfigurationError(f"Crash(point=...): expected one of {', '.join(POINTS)}, got {self.point!r}")

    def __str__(self) -> str:
        when = f"after {self.after_s:.3f} s" if self.after_s is not None else f"{self.point}, time {self.occurrence}"
        return f"{self.victim} {when}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A job for the harness.

    Attributes:
        command: the command that starts the job's driver.
        environment: additional environment variables of the driver.
        storage_path: the path or URI for the job's runs.
        name: the name of the run.
        metrics: the metrics that must equal those of an undisturbed run; None for all metrics whose names do not start
            with an underscore.
        same_files: True if the files of the last checkpoint must also equal those of an undisturbed run.
        deadline_s: maximum duration of one start in seconds.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    storage_path: str
    name: str
    metrics: frozenset[str] | None
    same_files: bool
    deadline_s: float


class JobStart:
    """One start of the job: its driver, and all processes that inherit the driver's environment.

    Args:
        job: the job to start.
        variables: additional environment variables of this start.
        output: the file for the output of this start.
        armed: True if the processes must report each point of the storage protocol that they reach, and wait there.
    """

    def __init__(self, job: JobSpec, variables: Mapping[str, str], output: Path, *, armed: bool) -> None:
        self.killed: list[int] = []
        self.driver_was_killed = False
        self.seconds = 0.0
        self._deadline_s = job.deadline_s
        self._output = output
        self._armed = armed
        self._mark = secrets.token_hex(8)
        self._pending: deque[Crash] = deque()
        self._reached = 0
        self._environment = {**os.environ, **job.environment, **variables, _MARK: self._mark}
        self._environment.pop(ADDRESS, None)
        self._command = job.command

    @property
    def output(self) -> str:
        """The output so far."""
        return self._output.read_text(errors="replace")

    def run(self, pending: deque[Crash]) -> list[str]:
        """Run the job until its driver exits, and remove the crashes that have happened from ``pending``.

        Returns:
            The findings.
        """
        self._pending = pending
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            if self._armed:
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="drivetrain-crash-"))
                path = Path(directory, "points")
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                with socket_address(path) as address:
                    listener.bind(address)
                listener.listen(128)
                self._environment[ADDRESS] = str(path)
                selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener, selector, stack))
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            driver = os.pidfd_open(self._process.pid)
            stack.callback(os.close, driver)
            selector.register(driver, selectors.EVENT_READ, lambda: None)
            try:
                return self._follow(selector)
            except BaseException:
                self._kill_all()
                raise

    def close(self) -> list[str]:
        """Wait until all processes have exited. If some do not exit in time, kill them, and return a finding."""
        deadline = time.monotonic() + _END_S
        while remaining := self._processes():
            if time.monotonic() > deadline:
                commands = [command_of(pid) for pid in remaining]
                self._kill_all()
                return [f"still running {_END_S:g} s after the driver exited: {commands}"]
            for pid in remaining:
                exits(pid, deadline - time.monotonic())
        return []

    def _follow(self, selector: selectors.BaseSelector) -> list[str]:
        started = since = time.monotonic()
        deadline = started + self._deadline_s
        while self._process.poll() is None:
            now = time.monotonic()
            if now > deadline:
                self._kill_all()
                self.driver_was_killed = True
                return [f"the job did not end within {self._deadline_s:g} s"]
            crash_at = deadline
            if self._pending and self._pending[0].after_s is not None and not self.driver_was_killed:
                crash_at = since + self._pending[0].after_s
                if now >= crash_at:
                    self._crash(self._pending.popleft())
                    since = now
                    continue
            for key, _ in selector.select(max(0.0, min(crash_at, deadline) - now)):
                key.data()
        self.seconds = time.monotonic() - started
        if self._process.returncode and not self.driver_was_killed:
            last = "\n".join(self.output.splitlines()[-20:])
            return [f"the job exited with code {self._process.returncode}:\n{last}"]
        return []

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
        connection, _ = listener.accept()
        stack.callback(connection.close)
        selector.register(connection, selectors.EVENT_READ, lambda: self._on_point(connection, selector))

    def _on_point(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Handle a process that has reached a point: crash now, or let it continue."""
        selector.unregister(connection)
        with contextlib.suppress(ConnectionError):
            pid, _, point = connection.recv(1000).decode().strip().partition(" ")
            if self._pending and self._pending[0].point == point and not self.driver_was_killed:
                self._reached += 1
                if self._reached == self._pending[0].occurrence:
                    self._reached = 0
                    self._crash(self._pending.popleft(), int(pid))
            connection.sendall(b".")

    def _crash(self, crash: Crash, at_point: int | None = None) -> None:
        if crash.victim == "both":
            self.killed.append(self._kill_all())
        else:
            victims = self._choose(crash.victim, at_point)
            for pid in victims:
                kill(pid)
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
        """Map the process id of each running process of the job to the process id of its parent."""
        return marked_processes(_MARK, self._mark)

    def _kill_all(self) -> int:
        """Kill all processes, including processes that start in the meantime. Return the number of killed processes."""
        return kill_marked(_MARK, self._mark)
