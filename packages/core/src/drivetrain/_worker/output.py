"""Redirects the stdout and stderr of a worker to its log, and sends them to the driver if it shows them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain._storage.layout import run_file

__all__ = ["LogFollower", "WorkerOutput", "flush_output", "log_name", "open_log"]

_READ_BYTES = 1 << 16
_CATCH_UP_S = 10.0
_CHECK_S = 0.05


def log_name(rank: int) -> str:
    """Return the name of a rank's log file."""
    return f"rank_{rank}.log"


def open_log(directory: Path | None, rank: int) -> int:
    """Open a rank's log for appending, or ``/dev/null`` if ``directory`` is None, and return the descriptor."""
    if directory is None:
        return os.open(os.devnull, os.O_WRONLY)
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.open(directory / log_name(rank), flags, run_file(log_name(rank)).mode)


def flush_output() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _redirect_output(descriptor: int) -> None:
    """Redirect stdout and stderr to a descriptor, and close the descriptor."""
    flush_output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class LogFollower:
    """Sends the output in a worker's log to the driver, which shows the output. For workers that may be on other nodes.

    The worker writes to the log directly, so a crash loses no output. A separate process and a thread read the log.

    Args:
        log: the path of the log file; None if it has none.
        descriptor: a descriptor of the log file, of which this object makes a copy.
        send: sends a part of the output to the driver.
    """

    def __init__(self, log: Path | None, descriptor: int, send: Callable[[bytes], None]) -> None:
        self._log = os.dup(descriptor)
        self._send = send
        self._position = os.fstat(self._log).st_size
        self._advanced = threading.Condition()
        self._has_ended = False
        # tail is notified of changes of a file with a path, and checks a file without a path periodically.
        interval = () if log is not None else ("-s", str(_CHECK_S))
        self._process = subprocess.Popen(
            [
                *("tail", "-f", *interval, "-c", f"+{self._position + 1}", f"--pid={os.getpid()}"),
                str(log or "/dev/stdin"),
            ],
            stdin=self._log,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._follow, name="drivetrain-output", daemon=True).start()

    def close(self) -> None:
        """Stop following the log."""
        self._process.kill()
        self._process.wait()
        os.close(self._log)

    def catch_up(self) -> None:
        """Wait, at most ten seconds, until the current contents of the log have been sent."""
        size = os.fstat(self._log).st_size
        with self._advanced:
            self._advanced.wait_for(lambda: self._position >= size or self._has_ended, _CATCH_UP_S)

    def _follow(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout:
                while data := os.read(self._process.stdout.fileno(), _READ_BYTES):
                    self._send(data)
                    with self._advanced:
                        self._position += len(data)
                        self._advanced.notify_all()
        finally:
            with self._advanced:
                self._has_ended = True
                self._advanced.notify_all()


class WorkerOutput:
    """Redirects the output of a worker process to a log, and sends the output to the driver if it is shown there.

    Args:
        send: sends a message to the driver.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._follower: LogFollower | None = None

    def redirect(self, directory: Path | None, rank: int, *, shown: bool) -> None:
        """Redirect the output to a rank's log.

        Args:
            directory: the directory of the logs. None to keep no log: output that is shown is then written to a
                temporary file, which has no name and does not outlive this process, and other output is discarded.
            rank: the rank.
            shown: True to send the output to the driver too, which shows it.
        """
        if directory is None and shown:
            with tempfile.TemporaryFile() as file:
                log = os.dup(file.fileno())
        else:
            log = open_log(directory, rank)
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if shown:
            path = None if directory is None else directory / log_name(rank)
            self._follower = LogFollower(path, log, lambda data: self._send(("output", data)))
        _redirect_output(log)

    def flush(self) -> None:
        """Wait until the output is in the log and, if the driver shows the output, has been sent to the driver."""
        flush_output()
        if self._follower is not None:
            self._follower.catch_up()
