"""Workers' standard output and error: to a log file each, and of some ranks to the console as well."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from drivetrain.console import Console

__all__ = ["LineEcho", "LogFollower", "OutputPipe", "log_name", "open_log", "tail_log"]

_READ_BYTES = 1 << 16
_CATCH_UP_S = 1.0


def log_name(rank: int) -> str:
    """The name of a rank's log file."""
    return f"rank_{rank}.log"


def open_log(directory: Path | None, rank: int) -> int:
    """A descriptor to append a rank's output to; of nothing where no logs are kept."""
    if directory is None:
        return os.open(os.devnull, os.O_WRONLY)
    directory.mkdir(parents=True, exist_ok=True)
    return os.open(directory / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def tail_log(directory: Path | None, rank: int, *, lines: int = 20, limit_bytes: int = 8192) -> str:
    """The last lines of a rank's log; empty where there is none."""
    if directory is None:
        return ""
    try:
        with (directory / log_name(rank)).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


class LineEcho:
    """Shows a rank's output on the console in whole lines, with the rank in front."""

    def __init__(self, rank: int, console: Console) -> None:
        self._prefix = f"[rank {rank}] "
        self._console = console
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Shows the lines that this part of the output completes."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines:
            self._console.print("\n".join(self._prefix + _decode(line) for line in lines))

    def finish(self) -> None:
        """Shows a last line that has no end."""
        if self._partial:
            self._console.print(self._prefix + _decode(self._partial))
            self._partial = b""


class OutputPipe:
    """Takes a worker's output as it comes, writes all of it to the log, and shows it line by line.

    Args:
        rank: whose output it is.
        log: a descriptor to write to; closed with the pipe.
        console: where lines are shown.
    """

    def __init__(self, rank: int, log: int, console: Console) -> None:
        self.rank = rank
        self.closed = False
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._log = log
        self._echo = LineEcho(rank, console)

    def redirect(self, log: int, console: Console) -> None:
        """Has what comes from now on go to another log, and be shown on another console."""
        os.close(self._log)
        self._log, self._echo = log, LineEcho(self.rank, console)

    def take_write_end(self) -> int:
        """The descriptor that the worker writes to; the caller closes its copy."""
        return self._write_end

    def read(self) -> bool:
        """Takes what is there, without waiting; False when that was nothing, for now or for ever."""
        try:
            data = os.read(self.read_end, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.closed = True
            return False
        with contextlib.suppress(OSError):  # a full disk must not end the training through its log
            os.write(self._log, data)
        self._echo.feed(data)
        return True

    def drain(self) -> None:
        """Takes everything that is there, and shows a last line without an end as well."""
        while self.read():
            pass
        self._echo.finish()

    def close(self) -> None:
        """Closes the pipe and the log."""
        os.close(self.read_end)
        os.close(self._log)


class LogFollower:
    """In a worker on another node: passes on what is appended to its log, for the driver to show.

    The worker writes to the log itself, so that a crash loses nothing of it; what follows is a process and a thread.

    Args:
        log: the file.
        send: takes each part of the output.
    """

    def __init__(self, log: Path, send: Callable[[bytes], None]) -> None:
        self._log = log
        self._send = send
        self._position = log.stat().st_size
        self._advanced = threading.Condition()
        self._process = subprocess.Popen(
            ["tail", "-f", "-c", f"+{self._position + 1}", f"--pid={os.getpid()}", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._follow, name="drivetrain-output", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def catch_up(self) -> None:
        """Waits, a second at most, until everything that is in the log by now has been passed on."""
        size = self._log.stat().st_size
        with self._advanced:
            self._advanced.wait_for(lambda: self._position >= size, _CATCH_UP_S)

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            while data := os.read(self._process.stdout.fileno(), _READ_BYTES):
                self._send(data)
                with self._advanced:
                    self._position += len(data)
                    self._advanced.notify_all()


def _decode(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
