"""Workers' standard output and error: to a log file each, and of some ranks to the console as well."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from drivetrain.console import Console

__all__ = ["OutputPipe", "log_name", "open_log", "tail_log"]

_READ_BYTES = 1 << 16


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


class OutputPipe:
    """Takes a worker's output as it comes, writes all of it to the log, and shows it line by line.

    Args:
        rank: whose output it is.
        log: a descriptor to write to; closed with the pipe.
        console: where lines are shown.
    """

    def __init__(self, rank: int, log: int, console: Console) -> None:
        self.rank = rank
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._log = log
        self._console = console
        self._partial = b""
        self.closed = False

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
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines:
            self._console.print("\n".join(self._prefixed(line) for line in lines))
        return True

    def drain(self) -> None:
        """Takes everything that is there, and shows a last line without an end as well."""
        while self.read():
            pass
        if self._partial:
            self._console.print(self._prefixed(self._partial))
            self._partial = b""

    def close(self) -> None:
        """Closes the pipe and the log."""
        os.close(self.read_end)
        os.close(self._log)

    def _prefixed(self, line: bytes) -> str:
        return f"[rank {self.rank}] {line.decode(errors='replace').rstrip(chr(13))}"
