"""Writes the reports of rank 0 to a CSV file as they arrive."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from drivetrain._base.metrics import flatten
from drivetrain._hooks.callback import Callback, Report
from drivetrain._storage.layout import PROGRESS_FILE
from drivetrain._storage.reading import MAX_LINE_BYTES
from drivetrain._storage.reports import line_too_long, read_line
from drivetrain.errors import StorageError

if TYPE_CHECKING:
    from drivetrain._hooks.context import Run

__all__ = ["CSVLoggerCallback"]

_ITERATION = "_training_iteration"
_MAX_ROW_LINES = 10_000
_MAX_DIGITS = 18


class CSVLoggerCallback(Callback):
    """Writes a row for every report of rank 0 to ``progress.csv``.

    Nested metrics are columns with names such as ``eval/accuracy``. A metric that first appears after the first
    report adds a column, which requires rewriting the file.
    """

    def __init__(self) -> None:
        self._file: io.FileIO | None = None
        self._columns: list[str] = []

    def on_report(self, run: Run, report: Report) -> None:
        """Append the report's row."""
        if report.rank != 0:
            return
        if self._file is None:
            self._file = self._open(run.path / PROGRESS_FILE)
        metrics = flatten(report.metrics)
        if not self._columns or not metrics.keys() <= set(self._columns):
            self._file = self._widen(self._file, metrics)
        self._file.write(_row(metrics.get(column, "") for column in self._columns))

    def on_resume(self, run: Run, iteration: int) -> None:
        """Remove the rows of later iterations, which will be reported again."""
        self.on_run_end(run, None)
        path = run.path / PROGRESS_FILE
        if not path.exists():
            return
        draft = path.with_name(f".{PROGRESS_FILE}.draft")
        with _lines_of(path) as old, draft.open("wb") as new:
            columns, rows = _parse(_complete_lines(old), str(path))
            new.write(_row(columns))
            for row in rows:
                if not _is_after(row.get(_ITERATION), iteration):
                    new.write(_row(row.get(column, "") for column in columns))
        os.replace(draft, path)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> io.FileIO:
        if path.exists():
            with _lines_of(path) as lines:
                self._columns = _parse(lines, str(path))[0]
        return io.FileIO(path, "a")

    def _widen(self, file: io.FileIO, metrics: Mapping[str, Any]) -> io.FileIO:
        """Replace the file with a file that also has a column for each of these metrics."""
        file.close()
        path = Path(str(file.name))
        self._columns += [name for name in metrics if name not in self._columns]
        draft = path.with_name(f".{PROGRESS_FILE}.draft")
        with _lines_of(path) as old, draft.open("wb") as new:
            new.write(_row(self._columns))
            for row in _parse(old, str(path))[1]:
                new.write(_row(row.get(column, "") for column in self._columns))
        os.replace(draft, path)
        return io.FileIO(path, "a")


@contextlib.contextmanager
def _lines_of(path: Path) -> Iterator[Iterator[str]]:
    """Yield an iterator over the lines of an untrusted CSV file. Parse them inside the ``with`` block.

    Raises:
        StorageError: a line or a value is too long, or the file is not a table of comma-separated values.
    """
    try:
        with path.open("rb") as file:
            yield _decoded(file, str(path))
    except csv.Error as error:
        raise StorageError(f"{path}: expected comma-separated values, got something else ({error})") from error


def _decoded(file: BinaryIO, where: str) -> Iterator[str]:
    while line := read_line(file, where):
        yield from io.StringIO(line.decode(errors="replace"), newline="")


def _parse(lines: Iterator[str], where: str) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Parse a table; return its columns, and an iterator over its rows.

    Raises:
        StorageError: a row is too long, or has too many lines: a quoted value can span any number of lines.
    """
    chars = count = 0

    def counted() -> Iterator[str]:
        nonlocal chars, count
        for line in lines:
            chars += len(line)
            count += 1
            if chars > MAX_LINE_BYTES:
                raise line_too_long(where, "a row")
            if count > _MAX_ROW_LINES:
                raise StorageError(
                    f"[DT-413] {where}: expected a row to have at most {_MAX_ROW_LINES:,} lines, got more"
                )
            yield line

    reader = csv.reader(counted())
    columns = next(reader, [])

    def rows() -> Iterator[dict[str, str]]:
        nonlocal chars, count
        chars = count = 0
        for row in reader:
            chars = count = 0
            if row:
                yield dict(zip(columns, row, strict=False))

    return columns, rows()


def _complete_lines(lines: Iterator[str]) -> Iterator[str]:
    """Return the lines without an incomplete last line of a killed run, in which a number may be truncated."""
    return (line for line in lines if line.endswith(("\n", "\r")))


def _is_after(value: str | None, iteration: int) -> bool:
    """Return True if the value in a row's iteration column is missing, invalid, or later than ``iteration``."""
    return value is None or not value.isdecimal() or len(value) > _MAX_DIGITS or int(value) > iteration


def _row(values: Iterable[Any]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue().encode()
