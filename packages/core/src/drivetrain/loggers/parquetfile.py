"""Writes reports to Parquet files: a compact form for runs with many ranks or reports."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain._base.jsontext import json_bytes
from drivetrain._base.metrics import MAX_TEXT, flatten, writable
from drivetrain._hooks.callback import Callback, Report
from drivetrain._storage.layout import METRICS, draft_name
from drivetrain._storage.parquetparts import RANK, PartName, existing_parts
from drivetrain._storage.reading import is_number
from drivetrain.errors import ConfigurationError
from drivetrain.loggers.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["ParquetLoggerCallback"]

_COMPRESSIONS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")
_BATCH_ROWS = 500
_FILE_ROWS = 100_000
_INTEGERS = ("_training_iteration", "_timestamp", "_pid", RANK)


class ParquetLoggerCallback(Callback):
    """Writes the reports of all ranks to Parquet files in the directory ``metrics`` of the run.

    They take a fraction of the space of ``result.json``, and any tool reads them as one table, such as
    ``pandas.read_parquet("RUN/metrics")``. :class:`drivetrain.runs.RunReader` and the run's page read them as well, for
    the ranks without a file of JSON lines. The column ``_rank`` is the rank, nested metrics are columns with names such
    as ``eval/accuracy``, and numbers are stored in double precision.

    Rows are collected in memory, and written when a checkpoint is reported, at the first report after ``interval_s``
    seconds, and at the end of an attempt. If the driver is killed, the rows since then are lost. A file is never
    changed: after a resume, the rows of iterations that are reported again are in two files. RunReader leaves out the
    earlier ones.

    It requires ``pyarrow``.

    Args:
        ranks: the ranks whose reports are written, or ``"all"``.
        every: write every n-th report of a rank: those whose iteration is divisible by it.
        min_interval_s: the minimum number of seconds between two written reports of a rank.
        interval_s: seconds between two files.
        compression: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"brotli"``, ``"lz4"`` or ``"none"``.

    Raises:
        ConfigurationError: an argument has the wrong type or is out of range, or ``pyarrow`` is not installed.

    Example:
        Write the reports of 1,000 ranks to Parquet files, and those of rank 0 also to ``result.json``::

            RunConfig(callbacks=[ParquetLoggerCallback(), JsonLoggerCallback(ranks=[0])])
    """

    def __init__(
        self,
        ranks: Collection[int] | Literal["all"] = "all",
        *,
        every: int = 1,
        min_interval_s: float = 0.0,
        interval_s: float = 60.0,
        compression: str = "zstd",
    ) -> None:
        if compression not in _COMPRESSIONS:
            raise ConfigurationError(
                f"ParquetLoggerCallback(compression=...): expected one of {', '.join(_COMPRESSIONS)}, got "
                f"{compression!r}"
            )
        if not is_number(interval_s) or interval_s <= 0:
            raise ConfigurationError(
                f"ParquetLoggerCallback(interval_s=...): expected a positive number of seconds, got {interval_s!r}"
            )
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigurationError(
                "ParquetLoggerCallback: expected the package pyarrow, which is not installed. Run: pip install pyarrow"
            )
        self._selection = Selection("ParquetLoggerCallback", ranks, every, min_interval_s)
        self._interval_s = float(interval_s)
        self._compression = compression
        self._rows: list[dict[str, Any]] = []
        self._batches: list[pa.Table] = []
        self._due = math.inf
        self._last_checkpoint = ""
        self._next = PartName(0, 0, 0)
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def on_run_start(self, run: Run) -> None:
        """Start the thread that writes, and import pyarrow in it."""
        parts = existing_parts(run.storage)
        self._next = parts[-1].following() if parts else PartName(0, 0, 0)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="drivetrain parquet")
        self._writing = self._writer.submit(_import_pyarrow)

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Finish the import before the first report, which would wait for it."""
        self._wait()

    def on_resume(self, run: Run, iteration: int) -> None:
        """Begin files that replace the rows of later iterations, which will be reported again."""
        self._selection.restart()
        self._flush(run)
        self._next = self._next.resumed(iteration)

    def on_report(self, run: Run, report: Report) -> None:
        """Collect the row."""
        if self._selection.selects(report):
            self._add(report)
        if report.checkpoint is not None and report.checkpoint != self._last_checkpoint:
            self._last_checkpoint = report.checkpoint
            self._flush(run)
            self._wait()  # before the commit
        elif time.monotonic() >= self._due or len(self._batches) * _BATCH_ROWS >= _FILE_ROWS:
            self._flush(run)

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Write the rows that other ranks have reported since."""
        self._flush(run)

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """Write the collected rows, with the last report of each rank."""
        for report in self._selection.take_last():
            self._add(report)
        self._flush(run)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Wait until the rows are written."""
        self._flush(run)
        self._wait()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def _add(self, report: Report) -> None:
        if not self._rows and not self._batches:
            self._due = time.monotonic() + self._interval_s
        self._rows.append({RANK: report.rank, **flatten(report.metrics)})
        if len(self._rows) >= _BATCH_ROWS:
            self._pack()

    def _pack(self) -> None:
        """Convert the rows to columns. A few hundred rows take about a millisecond, during which reports wait."""
        if self._rows:
            self._batches.append(_table(self._rows))
            self._rows = []

    def _flush(self, run: Run) -> None:
        """Write the collected rows to a new file, on another thread."""
        self._pack()
        self._due = math.inf
        if not self._batches or self._writer is None:
            return
        self._wait()
        directory, name = Path(run.path, METRICS), str(self._next)
        self._writing = self._writer.submit(_write, self._batches, directory, name, self._compression)
        self._batches = []
        self._next = self._next.following()

    def _wait(self) -> None:
        """Wait for the thread, and raise the error that it has met."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()


def _import_pyarrow() -> None:
    importlib.import_module("pyarrow.parquet")


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column(name, [row.get(name) for row in rows]) for name in names}
    return pa.table({writable(name): column for name, column in columns.items() if column is not None})


def _column(name: str, values: list[Any]) -> pa.Array | None:
    """Return values as a column; None if there are no values. A column has the same type in all files, if possible."""
    import pyarrow as pa

    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return None
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds <= {int, float}:
        try:
            if name in _INTEGERS and kinds == {int}:
                return pa.array(values, pa.int64())
            return pa.array([None if value is None else float(value) for value in values], pa.float64())
        except OverflowError:  # an integer is too large
            pass
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    value = writable(value)
    return value if isinstance(value, str) else json_bytes(value).decode()[:MAX_TEXT]


def _write(batches: Sequence[pa.Table], directory: Path, name: str, compression: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    kinds: dict[str, set[str]] = {}
    for batch in batches:
        for field in batch.schema:
            kinds.setdefault(field.name, set()).add(str(field.type))
    mixed = [column for column, found in kinds.items() if len(found) > 1]
    table = pa.concat_tables([_with_texts(batch, mixed) for batch in batches], promote_options="default")
    directory.mkdir(exist_ok=True)
    draft = directory / draft_name(name)
    pyarrow.parquet.write_table(table, draft, compression=compression)
    os.replace(draft, directory / name)


def _with_texts(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """Return a table in which the given columns contain text, because other parts of the file have other types."""
    import pyarrow as pa

    for place, name in enumerate(table.column_names):
        if name in columns:
            table = table.set_column(place, name, table.column(name).cast(pa.string()))
    return table
