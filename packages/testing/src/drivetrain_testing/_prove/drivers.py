"""Starts the drivers of a job, the next one while the current one still runs, so that its imports take no extra time.

Every driver is a new process with its own hash seed and random states. A process that is forked from a common parent
would start faster, but would hide scripts whose result depends on these.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain_testing._leftovers import exits
from drivetrain_testing._marked import kill_marked, marked_processes

__all__ = ["Driver", "Drivers"]

_MARK = "DRIVETRAIN_PROVE_MARK"
_EXIT_S = 10.0
_START = "from drivetrain_testing._prove.paused import main; main()"


@dataclass(frozen=True)
class Driver:
    """A process that executes the script, and marks all processes that it starts.

    Attributes:
        process: the process.
        mark: the value of the environment variable that the job's processes inherit.
        output: the file with its output.
        control: where it waits for a message before it continues; None if it does not wait.
    """

    process: subprocess.Popen[bytes]
    mark: str
    output: Path
    control: socket.socket | None

    def kill_all(self) -> None:
        """Kill the driver and all processes that it has started."""
        kill_marked(_MARK, self.mark)
        self.process.wait()

    def await_exits(self) -> None:
        """Wait until the job's processes have exited, as they do after the driver, and kill them after some time."""
        deadline = time.monotonic() + _EXIT_S
        while remaining := marked_processes(_MARK, self.mark):
            if time.monotonic() > deadline:
                kill_marked(_MARK, self.mark)
                return
            for pid in remaining:
                exits(pid, deadline - time.monotonic())


class Drivers(contextlib.AbstractContextManager["Drivers"]):
    """The drivers of a job, at most one of which is started ahead of time.

    Args:
        command: the command that starts a driver. Only a command of the form ``python script.py`` starts ahead of time.
        directory: the directory for the files with their output.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command = command
        self._directory = directory
        self._spare: Driver | None = None
        self._number = 0

    def __exit__(self, *error: object) -> None:
        if self._spare is not None:
            assert self._spare.control is not None
            self._spare.control.close()
            self._spare.kill_all()

    def prepare(self) -> None:
        """Start a driver, up to the end of the imports at the head of its script, for the next :meth:`start`."""
        is_script = self._command[0] == sys.executable and "".join(self._command[1:2]).endswith(".py")
        if is_script and self._spare is None:
            self._spare = self._start({}, waits=True)

    def start(self, environment: Mapping[str, str]) -> Driver:
        """Start a driver, or continue the one that waits, with these environment variables in addition."""
        if self._spare is None or "PYTHONHASHSEED" in environment:  # which counts only when a process starts
            return self._start(environment, waits=False)
        driver, self._spare = self._spare, None
        assert driver.control is not None
        with driver.control as control, contextlib.suppress(OSError):  # it has failed in its imports
            control.sendall(json.dumps(dict(environment)).encode() + b"\n")
        return driver

    def _start(self, environment: Mapping[str, str], *, waits: bool) -> Driver:
        self._number += 1
        mark = f"{os.getpid()}-{time.time_ns()}-{self._number}"
        path = self._directory / f"output{self._number}"
        control = theirs = None
        command = list(self._command)
        if waits:
            control, theirs = socket.socketpair()
            command[1:1] = ["-c", _START, str(theirs.fileno())]
        with path.open("ab") as output, theirs or contextlib.nullcontext():
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=() if theirs is None else (theirs.fileno(),),
                start_new_session=True,  # Ctrl-C ends this program, which then kills the job
            )
        return Driver(process, mark, path, control)
