"""Finds runs, and reads each of them through one object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drivetrain._base.metrics import flatten
from drivetrain._storage.directory import Storage, runs_location
from drivetrain._storage.layout import RUN_FILE, result_file
from drivetrain._storage.parquetparts import existing_parts, ranks_in, read_part, take_rank
from drivetrain._storage.remote import locate
from drivetrain._storage.reports import rank_files, read_lines
from drivetrain._storage.timeline import read_timeline
from drivetrain.errors import StorageError
from drivetrain.runs._curves import Curve, CurveReader, choose_curves
from drivetrain.runs._records import (
    RunRecord,
    checkpoint_sizes,
    read_run,
    read_usage,
    summarize_run,
    unreadable_run,
)

__all__ = ["RunReader", "list_runs", "open_run", "readers_in"]


class RunReader:
    """Reads a run, whether it has finished or not, without changing or locking it.

    Nothing in the directory is unpickled or executed. Every method reads the current files, so the results of a running
    run change.

    Args:
        storage: the run directory.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def directory_name(self) -> str:
        """The name of the run directory."""
        return os.path.basename(self.storage.root.rstrip("/"))

    def record(self) -> RunRecord:
        """Return the state of the run, its attempts with their failures, and its checkpoints.

        Raises:
            StorageError: the run cannot be read, or a newer drivetrain wrote it.
        """
        return read_run(self.storage)

    def summary(self) -> dict[str, Any]:
        """Return the values of the run's row in a table of runs.

        If the run cannot be read, its ``status`` is ``unreadable`` and its ``error`` is the reason.
        """
        return summarize_run(self.storage)

    def unreadable(self, reason: str) -> dict[str, Any]:
        """Return the values that :meth:`summary` returns if the run cannot be read for the given reason."""
        return unreadable_run(self.storage, reason)

    def ranks(self) -> list[int]:
        """Return the ranks that have reported.

        Raises:
            StorageError: a file of the reports cannot be read.
            ConfigurationError: the run has Parquet files, and ``pyarrow`` is not installed.
        """
        ranks = set(rank_files(self.storage))
        return sorted(ranks.union(*(ranks_in(self.storage, part) for part in existing_parts(self.storage))))

    def reports(self, rank: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the reports of a rank, oldest first, with the metrics that drivetrain adds, such as ``_timestamp``.

        They are read from the rank's file of JSON lines, or else from Parquet files, in which nested metrics are flat.

        Raises:
            StorageError: the file of the reports cannot be read.
            ConfigurationError: the run has Parquet files, and ``pyarrow`` is not installed.
        """
        if rank in rank_files(self.storage):
            yield from read_lines(self.storage, result_file(rank))
        else:
            yield from (report for reporter, report in self._parquet_reports() if reporter == rank)

    def _parquet_reports(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rank and the metrics of each report in the run's Parquet files."""
        parts = existing_parts(self.storage)
        for part in parts:
            for reports in read_part(self.storage, part, parts):
                yield from ((take_rank(report), report) for report in reports)

    def columns(self, rank: int = 0) -> dict[str, list[Any]]:
        """Return the metrics of a rank as columns of equal length, with one value per report.

        Returns:
            The values by the name of the metric, ``outer/inner`` for nested metrics. A value is None where a report
            does not contain the metric. ``pandas.DataFrame(columns)`` makes a table of them.

        Raises:
            StorageError: the file of the reports cannot be read.
        """
        rows = [flatten(report) for report in self.reports(rank)]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def curves(self, metrics: Sequence[str] = (), ranks: Sequence[int] | None = None) -> dict[str, dict[str, Curve]]:
        """Return the curves of metrics that are numbers, by metric and then by label, such as ``rank 0``.

        A curve has bounded size, whatever the number of reports.

        Args:
            metrics: the metrics, ``outer/inner`` for nested metrics; empty for all of them.
            ranks: the ranks; None for all ranks.

        Raises:
            ValueError: a metric has no curve, or no curve is left.
            StorageError: the files of the reports cannot be read.
        """
        reader = CurveReader(self.storage)
        reader.update()
        return choose_curves(reader.curves(), metrics, ranks)

    def timeline(self) -> Iterator[dict[str, Any]]:
        """Yield what has happened in the run, oldest first: the name of the event as ``event``, and its values.

        Raises:
            StorageError: the file cannot be read.
        """
        for record in read_timeline(self.storage):
            yield {"event": type(record).__name__, **asdict(record)}

    def usage(self) -> list[dict[str, Any]]:
        """Return the resource usage over time: for each rank, the parallel lists ``time``, ``cpus`` and ``bytes``.

        Raises:
            StorageError: the file cannot be read.
        """
        return read_usage(self.storage)

    def checkpoint_size(self, name: str) -> tuple[int, int] | None:
        """Return the total bytes and the number of files of a checkpoint; None if its list of files cannot be read."""
        return checkpoint_sizes(self.storage, name)

    def __repr__(self) -> str:
        return f"RunReader({self.storage.root!r})"


def list_runs(
    path: str | os.PathLike[str] | None = None, *, storage_filesystem: Any | None = None
) -> Iterator[RunReader]:
    """Yield the runs in a directory, sorted by the names of their directories.

    Args:
        path: the directory that contains the run directories, or a run directory; None for the default storage path.
        storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to select it by the path.

    Raises:
        ConfigurationError: the path is not valid, or a package that its filesystem requires is not installed.

    Example:
        Print the runs that have failed::

            for run in drivetrain.runs.list_runs():
                if run.record().status == "failed":
                    print(run.directory_name, run.record().error_line)
    """
    return readers_in(runs_location(None if path is None else os.fspath(path), storage_filesystem))


def open_run(path: str | os.PathLike[str], *, storage_filesystem: Any | None = None) -> RunReader:
    """Return the reader of a run.

    Args:
        path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
        storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to select it by the path.

    Raises:
        StorageError: the directory contains no run.
        ConfigurationError: the path is not valid, or a package that its filesystem requires is not installed.

    Example:
        >>> import drivetrain
        >>> result = drivetrain.DataParallelTrainer(
        ...     lambda: [drivetrain.report({"loss": 1 / step}) for step in (1, 2)] and None,
        ...     run_config=drivetrain.RunConfig(verbose=0),
        ... ).fit()
        >>> open_run(result.path).columns()["loss"]
        [1.0, 0.5]
    """
    storage = Storage(*locate(path, storage_filesystem, what="open_run"))
    if not storage.exists(RUN_FILE):
        raise StorageError(
            f"[DT-703] {storage.root}: expected a run directory with {RUN_FILE}, got a directory without it"
        )
    return RunReader(storage)


def readers_in(directory: Storage) -> Iterator[RunReader]:
    """Yield the runs in a directory, sorted by name; or the run itself if it is a run directory."""
    if directory.exists(RUN_FILE):
        yield RunReader(directory)
        return
    for name in directory.list_names()[0]:
        try:
            path = directory.path(name)
        except StorageError:  # a bucket can contain an object with ".." in its name
            continue
        run = Storage(directory.filesystem, path, directory.limits)
        if run.exists(RUN_FILE):
            yield RunReader(run)
