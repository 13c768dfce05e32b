"""Writes the reports of rank 0 to a CSV file as they arrive."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from drivetrain._base.jsontext import comma_separated
from drivetrain._base.metrics import MAX_TEXT, flatten, writable
from drivetrain._hooks.callback import Callback, Report
from drivetrain._storage.layout import PROGRESS_FILE
from drivetrain._storage.reading import MAX_LINE_BYTES
from drivetrain._storage.reports import line_too_long, read_line
from drivetrain.errors import StorageError
from drivetrain.loggers.selection import Selection

if TYPE_CHECKING:
    from drivetrain._hooks.context import Run

__all__ = ["CSVLoggerCallback"]

_ITERATION = "_training_iteration"
_MAX_ROW_LINES = 10_000
_MAX_DIGITS = 18
_SHORT_TEXT = 100
_NUMBERS = frozenset((int, float))
_ESCAPED = {0: r"\0", 13: r"\r"}
_COPIED_BYTES = 1 << 20


class CSVLoggerCallback(Callback):
    """Writes a row for every report of rank 0 to ``progress.csv``.

    Nested metrics are columns with names such as ``eval/accuracy``. A metric that first appears after the first report
    adds a column. A thread copies the file for this, and the earlier rows remain shorter than the header. The last
    report is always written.

    Args:
        every: write every n-th report: those whose iteration is divisible by it.
        min_interval_s: the minimum number of seconds between two rows.

    Raises:
        ConfigurationError: an argument has the wrong type or is out of range.
    """

    def __init__(self, *, every: int = 1, min_interval_s: float = 0.0) -> None:
        self._selection = Selection("CSVLoggerCallback", "all", every, min_interval_s)
        self._file: io.FileIO | None = None
        self._columns: dict[str, None] = {}  # the keys are the columns in their order
        self._widening: _Widening | None = None

    def on_report(self, run: Run, report: Report) -> None:
        """Append the report's row."""
        if report.rank == 0 and (self._selection.selects_all or self._selection.selects(report)):
            self._write(run, report)

    def _write(self, run: Run, report: Report) -> None:
        metrics = flatten(report.metrics)
        if self._file is None:
            self._file = self._open(run.path / PROGRESS_FILE, metrics)
        if self._widening is not None:
            self._widening.rows.append(metrics)
        elif not metrics.keys() <= self._columns.keys():
            end = os.fstat(self._file.fileno()).st_size
            self._widening = _Widening(Path(str(self._file.name)), list(self._columns), end, [metrics])
        self._file.write(_row(list(map(metrics.get, self._columns))))
        if self._widening is not None and self._widening.is_copied:
            self._finish_widening()

    def on_resume(self, run: Run, iteration: int) -> None:
        """Remove the rows of later iterations, which will be reported again."""
        self._close()
        self._selection.restart()
        path = run.path / PROGRESS_FILE
        if not path.exists():
            return
        draft = path.with_name(f".{PROGRESS_FILE}.draft")
        with _lines_of(path) as old, draft.open("wb") as new:
            columns, rows = _parse(_complete_lines(old), str(path))
            if columns:  # a driver that is killed before the first report leaves an empty file
                new.write(_row(columns))
            for row in rows:
                if not _is_after(row.get(_ITERATION), iteration):
                    new.write(_row(list(map(row.get, columns))))
        os.replace(draft, path)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Write the last report, and close the file."""
        for report in self._selection.take_last():
            self._write(run, report)
        self._close()

    def _close(self) -> None:
        while self._widening is not None:
            self._finish_widening()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path, metrics: Mapping[str, Any]) -> io.FileIO:
        if path.exists():
            with _lines_of(path) as lines:
                self._columns = dict.fromkeys(_parse(lines, str(path))[0])
        file = io.FileIO(path, "a")
        if not self._columns:
            self._columns = dict.fromkeys(metrics)
            file.write(_row(list(metrics)))
        return file

    def _finish_widening(self) -> None:
        """Replace the file with the copy that has more columns."""
        assert self._widening is not None
        assert self._file is not None
        widening, self._widening = self._widening, None
        self._file.close()
        self._widening = widening.finish()
        self._columns = dict.fromkeys(widening.columns)
        self._file = io.FileIO(widening.path, "a")


class _Widening:
    """Adds columns to a file, without delaying the reports that arrive meanwhile.

    A thread copies the rows up to ``end`` behind a header with more columns. Meanwhile, the rows of new reports are
    appended to the file without the new columns, and kept in memory. :meth:`finish` appends them to the copy with all
    columns. The file is therefore complete and valid whenever the driver is killed, except for the values of the new
    columns, which are then only in ``result.json``.

    Args:
        path: the file.
        columns: the columns of the file.
        end: the offset of the first row that has further columns.
        rows: the metrics of the rows from that offset on.

    Attributes:
        columns: the columns of the copy.
        rows: the metrics of all rows after ``end``. The owner adds those of further reports.
    """

    def __init__(self, path: Path, columns: Sequence[str], end: int, rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.columns = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        self.rows = rows
        self._draft = path.with_name(f".{PROGRESS_FILE}.draft")
        self._error: OSError | None = None
        self._thread = threading.Thread(
            target=self._copy, args=(len(_row(columns)), end), daemon=True, name="drivetrain csv"
        )
        self._thread.start()

    @property
    def is_copied(self) -> bool:
        """True if :meth:`finish` returns without waiting."""
        return not self._thread.is_alive()

    def finish(self) -> _Widening | None:
        """Replace the file.

        Returns:
            The next change of the file, if later rows have columns that the copy does not have.

        Raises:
            OSError: the copy could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        known = set(self.columns)
        wider: tuple[int, int] | None = None
        with self._draft.open("ab") as copy:
            for number, metrics in enumerate(self.rows):
                if wider is None and not metrics.keys() <= known:
                    wider = copy.tell(), number
                copy.write(_row(list(map(metrics.get, self.columns))))
        os.replace(self._draft, self.path)
        return _Widening(self.path, self.columns, wider[0], self.rows[wider[1] :]) if wider else None

    def _copy(self, start: int, end: int) -> None:
        try:
            with self.path.open("rb") as old, self._draft.open("wb") as copy:
                copy.write(_row(self.columns))
                old.seek(start)
                while start < end and (data := old.read(min(_COPIED_BYTES, end - start))):
                    start += copy.write(data)
        except OSError as error:
            self._error = error


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


def _row(values: Sequence[Any]) -> bytes:
    """Return a row. Values that could not be read again are shortened, and None is an empty value."""
    if _NUMBERS.issuperset(map(type, values)):  # much faster
        try:
            data = comma_separated(values) + b"\n"
        except ValueError:  # an integer has too many digits
            data = b""
        if 0 < len(data) <= MAX_TEXT:
            return data
    row = [_cell(value, MAX_TEXT) for value in values]
    data = _csv(row)
    if len(data) >= MAX_LINE_BYTES or data.count(b"\n") > _MAX_ROW_LINES:
        data = _csv([_cell(value, _SHORT_TEXT) for value in row]).replace(b"\n", b" ").rstrip() + b"\n"
    return data


def _cell(value: Any, max_text: int) -> Any:
    """Return a value without the characters that not every reader of CSV files accepts in a value."""
    if isinstance(value, float) or value is None:
        return value
    value = writable(value, max_text)
    return value if isinstance(value, int) else str(value).translate(_ESCAPED)


def _csv(values: Iterable[Any]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue().encode()
