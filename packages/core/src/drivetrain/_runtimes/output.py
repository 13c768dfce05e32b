"""Shows the output of workers on the console, and reads the last lines of their logs. Runs in the driver."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from pathlib import Path

from drivetrain._base.console import Console
from drivetrain._storage.reading import open_regular
from drivetrain._worker.output import log_name
from drivetrain.errors import StorageError

__all__ = ["LineEcho", "OutputPipe", "tail_log"]

_READ_BYTES = 1 << 16
_UP = "\x1b[A"
_MOVES = re.compile(r"(\r*\n|\r|\x1b\[A)")
_BAR = re.compile(r".*\[(?:\d+:)?\d\d:\d\d[^\]]*\]")  # the end of a tqdm bar: [00:02<00:01, 19.8it/s, loss=0.5]
_MAX_ROWS = 6
_MAX_BAR = 1_000
_MAX_ROW = 1 << 16  # characters after which a line is shown although it has not ended
_TAIL_LINES = 30
_TAIL_CHARACTERS = 8192
_CRASH_BYTES = 1 << 20  # more than the stacks of 100 threads, of which Python writes no more
_CRASH = (
    # The stacks of the other threads, and the names of all loaded extension modules.
    (re.compile(r"^Thread 0x.*\(most recent call first\):\n(?:  .*\n)*\n?", re.MULTILINE), ""),
    (re.compile(r"^\n?Extension modules: .*\n?", re.MULTILINE), ""),
    # The stack of the thread that failed, after its first ten frames, which are the most recent calls.
    (re.compile(r"^(Current thread 0x.*\n(?:  .*\n){10})(?:  .*\n)+", re.MULTILINE), r"\1  ...\n"),
)


def tail_log(directory: Path | None, rank: int) -> str:
    """Return the last lines of a rank's log; an empty string if there is no log.

    The stacks that Python writes when a signal such as SIGSEGV ends the process are shortened to that of the thread
    that failed. Otherwise they would displace the lines before the failure.
    """
    if directory is None:
        return ""
    try:
        with open(open_regular(str(directory), log_name(rank)), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _CRASH_BYTES))
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, StorageError):
        return ""
    for pattern, replacement in _CRASH:
        text = pattern.sub(replacement, text)
    return "\n".join(text.splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


class _Row:
    """A line of output that may still be rewritten."""

    def __init__(self) -> None:
        self.text = ""
        self._rewritten = False

    @property
    def is_bar(self) -> bool:
        """True if the line was rewritten from its start, or looks like a progress bar."""
        return self._rewritten or (len(self.text) <= _MAX_BAR and _BAR.match(self.text) is not None)

    def write(self, text: str, *, from_start: bool) -> None:
        """Append text, or replace the line if ``from_start`` is True. Replacing the line by spaces clears a bar."""
        if from_start:
            self._rewritten = bool(text.strip()) and (self._rewritten or bool(self.text.strip()))
            self.text = ""
        self.text += text

    def end(self) -> None:
        """At the end of the line, remove a bar that other text follows, because the bar is redrawn on the next line."""
        bar = _BAR.match(self.text[:_MAX_BAR])
        if bar is not None and self.text[bar.end() :].strip():
            self.text, self._rewritten = self.text[bar.end() :], False


class LineEcho:
    """Shows a rank's output on the console in whole lines, prefixed with the rank.

    A progress bar is a line that is rewritten repeatedly. The bars of rank 0 are live lines of the console, and the
    last state of a finished bar remains as a normal line. Bars of other ranks are not shown, because they show the same
    progress. A rank may draw up to six bars below one another, by moving the cursor up and down.
    """

    def __init__(self, rank: int, console: Console) -> None:
        self._rank = rank
        self._console = console
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rows = [_Row()]
        self._place = 0
        self._rest = ""
        self._from_start = False
        self._had_bars = False

    def feed(self, data: bytes) -> None:
        """Process the next part of the output, and show the lines that it completes."""
        *parts, self._rest = _MOVES.split(self._rest + self._decoder.decode(data))
        if (escape := self._rest.rfind("\x1b")) < 0 or len(self._rest) - escape > len(_UP):
            escape = len(self._rest)
        parts.append(self._rest[:escape])
        self._rest = self._rest[escape:]  # possibly the start of a cursor movement
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
                if len(self._rows[self._place].text) > _MAX_ROW:
                    self._end_line()
        finished = [place for place, row in enumerate(self._rows[: self._place], 1) if not row.is_bar]
        self._release(max(finished[-1] if finished else 0, len(self._rows) - _MAX_ROWS))

    def _end_line(self) -> None:
        self._rows[self._place].end()
        self._place += 1
        if self._place == len(self._rows):
            self._rows.append(_Row())
        self._from_start = False

    def finish(self) -> None:
        """Show the remaining output, including a last line without a newline."""
        self._rows[self._place].text += self._rest
        if not self._rows[-1].text:
            self._rows.pop()
        self._release(len(self._rows))
        self._rows, self._place, self._from_start, self._rest = [_Row()], 0, False, ""

    def _release(self, count: int) -> None:
        """Print the first ``count`` rows as lines, and show the progress bars among the rest as live lines."""
        shows_bars = self._rank == 0
        finished, self._rows = self._rows[:count], self._rows[count:]
        self._place = max(0, self._place - count)
        bars = [row.text for row in self._rows if row.is_bar and row.text.strip()] if shows_bars else []
        prefix = self._console.prefix(self._rank)
        if bars or self._had_bars:
            self._console.bars([prefix + text for text in bars])
            self._had_bars = bool(bars)
        printed = [row for row in finished if not row.is_bar or (shows_bars and row.text.strip())]
        if printed:
            self._console.print("\n".join(prefix + row.text for row in printed))


class OutputPipe:
    """Reads a worker's output, writes it to the log, and shows it line by line.

    Args:
        rank: the rank of the worker.
        log: the descriptor of the log, which :meth:`close` closes.
        console: shows the lines.
    """

    def __init__(self, rank: int, log: int, console: Console) -> None:
        self.rank = rank
        self.closed = False
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._log = log
        self._echo = LineEcho(rank, console)

    def redirect(self, log: int, console: Console) -> None:
        """From now on, write the output to another log, and show it on another console."""
        os.close(self._log)
        self._log, self._echo = log, LineEcho(self.rank, console)

    def write_end_for_worker(self) -> int:
        """Return the descriptor to which the worker writes. The caller must close it."""
        return self._write_end

    def read(self) -> bool:
        """Read the available output without waiting. Return False if there is none now, or if the output has ended."""
        try:
            data = os.read(self.read_end, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.closed = True
            return False
        with contextlib.suppress(OSError):  # a full disk must not fail the run because of the log
            os.write(self._log, data)
        self._echo.feed(data)
        return True

    def drain(self) -> None:
        """Read all available output, and also show a last line without a newline."""
        while self.read():
            pass
        self._echo.finish()

    def close(self) -> None:
        """Close the pipe and the log."""
        os.close(self.read_end)
        os.close(self._log)
