"""Workers' standard output and error: to a log file each, and of some ranks to the console as well."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain._base.console import Console
from drivetrain._storage.layout import file_mode
from drivetrain._storage.reading import open_regular
from drivetrain.errors import StorageError

__all__ = ["LineEcho", "LogFollower", "OutputPipe", "WorkerOutput", "flush_output", "log_name", "open_log", "tail_log"]

_READ_BYTES = 1 << 16
_CATCH_UP_S = 1.0
_UP = "\x1b[A"
_MOVES = re.compile(r"(\r*\n|\r|\x1b\[A)")
_BAR = re.compile(r".*\[(?:\d+:)?\d\d:\d\d[^\]]*\]")  # as tqdm ends it: [00:02<00:01, 19.8it/s, loss=0.5]
_MOST_ROWS = 6


def log_name(rank: int) -> str:
    """The name of a rank's log file."""
    return f"rank_{rank}.log"


def open_log(directory: Path | None, rank: int) -> int:
    """A descriptor to append a rank's output to; of nothing where no logs are kept."""
    if directory is None:
        return os.open(os.devnull, os.O_WRONLY)
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.open(directory / log_name(rank), flags, file_mode(log_name(rank)))


def tail_log(directory: Path | None, rank: int, *, lines: int = 20, limit_bytes: int = 8192) -> str:
    """The last lines of a rank's log; empty where there is none."""
    if directory is None:
        return ""
    try:
        with open(open_regular(str(directory), log_name(rank)), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except (FileNotFoundError, StorageError):
        return ""


def flush_output() -> None:
    """Flushes standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _redirect_output(descriptor: int) -> None:
    """Redirects standard output and standard error to a descriptor, and closes it."""
    flush_output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class _Row:
    """A line that is not ended for good."""

    def __init__(self) -> None:
        self.text = ""
        self._rewritten = False

    @property
    def is_bar(self) -> bool:
        """Whether it was written anew from its beginning, or looks as if it will be."""
        return self._rewritten or _BAR.match(self.text) is not None

    def write(self, text: str, *, from_start: bool) -> None:
        """Adds text, or puts it in place of what is there; spaces take a bar away."""
        if from_start:
            self._rewritten = bool(text.strip()) and (self._rewritten or bool(self.text.strip()))
            self.text = ""
        self.text += text

    def end(self) -> None:
        """Leaves what was written behind a bar, as the bar will be drawn again on the next line."""
        bar = _BAR.match(self.text)
        if bar is not None and self.text[bar.end() :].strip():
            self.text, self._rewritten = self.text[bar.end() :], False


class LineEcho:
    """Shows a rank's output on the console in whole lines, with the rank in front.

    Progress bars, which are lines that are written again and again, are live lines of the console, those of rank 0; of
    one that is no longer written the last state stays as a line. Those of other ranks are not shown: they say the
    same. Bars below one another, for which the cursor moves up and down, are followed, a few of them.
    """

    def __init__(self, rank: int, console: Console) -> None:
        self._prefix = f"[rank {rank}] "
        self._console = console
        self._shows_bars = rank == 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rows = [_Row()]
        self._place = 0
        self._rest = ""
        self._from_start = False
        self._had_bars = False

    def feed(self, data: bytes) -> None:
        """Shows the lines that this part of the output completes."""
        *parts, self._rest = _MOVES.split(self._rest + self._decoder.decode(data))
        if (escape := self._rest.rfind("\x1b")) < 0 or len(self._rest) - escape > len(_UP):
            escape = len(self._rest)
        parts.append(self._rest[:escape])
        self._rest = self._rest[escape:]  # perhaps the beginning of a move
        for part in parts:
            if part.endswith("\n"):
                self._end_line()
            elif part == "\r":
                self._from_start = True
            elif part == _UP:
                self._place = max(0, self._place - 1)
            elif part:
                self._rows[self._place].write(part, from_start=self._from_start)
                self._from_start = False
        ended = [place for place, row in enumerate(self._rows[: self._place], 1) if not row.is_bar]
        self._end(max(ended[-1] if ended else 0, len(self._rows) - _MOST_ROWS))

    def _end_line(self) -> None:
        self._rows[self._place].end()
        self._place += 1
        if self._place == len(self._rows):
            self._rows.append(_Row())
        self._from_start = False

    def finish(self) -> None:
        """Shows what has no end."""
        self._rows[self._place].text += self._rest
        if not self._rows[-1].text:
            self._rows.pop()
        self._end(len(self._rows))
        self._rows, self._place, self._from_start, self._rest = [_Row()], 0, False, ""

    def _end(self, count: int) -> None:
        """Makes lines of the first rows, and shows the others as far as they are bars."""
        ended, self._rows = self._rows[:count], self._rows[count:]
        self._place = max(0, self._place - count)
        bars = [row.text for row in self._rows if row.is_bar and row.text.strip()] if self._shows_bars else []
        if bars or self._had_bars:
            self._console.bars([self._prefix + text for text in bars])
            self._had_bars = bool(bars)
        kept = [row for row in ended if not row.is_bar or (self._shows_bars and row.text.strip())]
        if kept:
            self._console.print("\n".join(self._prefix + row.text for row in kept))


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


class WorkerOutput:
    """Where the standard output and error of a worker process go.

    Args:
        send: sends a message to the driver.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._follower: LogFollower | None = None

    def redirect(self, directory: Path, rank: int, *, shown: bool) -> None:
        """Redirects the output to a rank's log.

        Args:
            directory: the directory of the logs.
            rank: the rank.
            shown: whether the output is also sent to the driver.
        """
        _redirect_output(open_log(directory, rank))
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if shown:
            self._follower = LogFollower(directory / log_name(rank), lambda data: self._send(("output", data)))

    def settle(self) -> None:
        """Waits until everything that was printed is in the log, and at the driver if that shows it."""
        flush_output()
        if self._follower is not None:
            self._follower.catch_up()
