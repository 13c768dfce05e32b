"""Writes reports as JSON lines as they arrive."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from drivetrain._base.jsontext import json_bytes
from drivetrain._base.metrics import MAX_TEXT, writable
from drivetrain._hooks.callback import Callback, Report
from drivetrain._storage.layout import result_file, run_file
from drivetrain._storage.reading import MAX_LINE_BYTES, Fields, parse_json
from drivetrain._storage.reports import line_too_long, read_line
from drivetrain.errors import StorageError
from drivetrain.loggers.selection import Selection

if TYPE_CHECKING:
    from drivetrain._hooks.context import Run

__all__ = ["JsonLoggerCallback"]

_SHORT_TEXT = 100


class JsonLoggerCallback(Callback):
    """Writes a line for every report: of rank 0 to ``result.json``, of other ranks to ``result_rank_<n>.json``.

    Each line is written to the operating system before the next report is processed; nothing is buffered in memory.
    Without arguments, every report of every rank is written. The last report of a rank is always written.

    Args:
        ranks: the ranks whose reports are written, or ``"all"``.
        every: write every n-th report of a rank: those whose iteration is divisible by it.
        min_interval_s: the minimum number of seconds between two written reports of a rank.

    Raises:
        ConfigurationError: an argument has the wrong type or is out of range.

    Example:
        Write one report a minute, of rank 0 only::

            RunConfig(callbacks=[JsonLoggerCallback(ranks=[0], min_interval_s=60)])
    """

    def __init__(
        self, ranks: Collection[int] | Literal["all"] = "all", *, every: int = 1, min_interval_s: float = 0.0
    ) -> None:
        self._selection = Selection("JsonLoggerCallback", ranks, every, min_interval_s)
        self._files: dict[int, int] = {}

    def on_report(self, run: Run, report: Report) -> None:
        """Append the line."""
        if self._selection.selects_all or self._selection.selects(report):
            self._write(run, report)

    def _write(self, run: Run, report: Report) -> None:
        file = self._files.get(report.rank)
        if file is None:
            file = self._files[report.rank] = _open_for_lines(run.path / result_file(report.rank))
        os.write(file, _line(report.metrics) + b"\n")

    def on_resume(self, run: Run, iteration: int) -> None:
        """Remove the lines of later iterations, which will be reported again."""
        self._close()
        self._selection.restart()
        for path in run.path.glob("result*.json"):
            _drop_lines_after(path, iteration)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Write the last reports, and close the files."""
        for report in self._selection.take_last():
            self._write(run, report)
        self._close()

    def _close(self) -> None:
        while self._files:
            with contextlib.suppress(OSError):
                os.close(self._files.popitem()[1])


def _line(metrics: Mapping[str, Any]) -> bytes:
    """Return the metrics as one line of JSON. Values that could not be read again are shortened."""
    try:
        line = json_bytes(metrics)
    except ValueError:  # an integer has too many digits
        line = b""
    if 0 < len(line) <= MAX_TEXT:
        return line
    for max_text in (MAX_TEXT, _SHORT_TEXT):
        line = json_bytes(writable(dict(metrics), max_text))
        if len(line) < MAX_LINE_BYTES:
            return line
    automatic = {name: value for name, value in metrics.items() if name.startswith("_")}
    return json_bytes(
        {**automatic, "_omitted": f"{len(metrics) - len(automatic):,} metrics, which are too long for a line"}
    )


def _drop_lines_after(path: os.PathLike[str], iteration: int) -> None:
    """Truncate a file before the first line that is damaged or belongs to a later iteration.

    Raises:
        StorageError: a line is too long.
    """
    end = 0
    with open(path, "r+b") as file:
        while line := read_line(file, str(path)):
            with contextlib.suppress(StorageError):
                report = Fields(parse_json(line, str(path)), str(path))
                if line.endswith(b"\n") and report.number("_training_iteration", 0) <= iteration:
                    end += len(line)
                    continue
            break
        file.truncate(end)


def _open_for_lines(path: os.PathLike[str]) -> int:
    """Open a file for appending, and remove an incomplete last line that a killed run has left.

    Raises:
        StorageError: the incomplete line is too long.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, run_file(os.fspath(path)).mode)
    end = size = os.lseek(file, 0, os.SEEK_END)
    while end:
        if size - end >= MAX_LINE_BYTES:
            os.close(file)
            raise line_too_long(str(path))
        start = max(0, end - 65536)
        cut = os.pread(file, end - start, start).rfind(b"\n")
        if cut >= 0:
            end = start + cut + 1
            break
        end = start
    if end != size:
        os.ftruncate(file, end)
    return file
