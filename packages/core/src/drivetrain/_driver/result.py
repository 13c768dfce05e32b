"""The result of a run: its latest metrics, its checkpoints and its directory."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from drivetrain._base.metrics import flatten, has_metric, reported_metrics, writable
from drivetrain._base.notebook import as_table
from drivetrain._base.outcome import RunOutcome
from drivetrain._base.printable import printable_text
from drivetrain._base.redact import redact
from drivetrain._plugins.loading import load_plugin
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import ERROR_FILE, RUN_FILE, result_file
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.reading import Fields, parse_json
from drivetrain._storage.remote import locate
from drivetrain._storage.reports import last_report, read_line
from drivetrain._storage.retention import rank_checkpoints
from drivetrain._storage.timeline import DriverStarted, RunEnded, read_timeline
from drivetrain.errors import CheckpointError, FailureKind, StorageError, TrainingFailedError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Result", "last_metrics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run, as ``fit()`` returns it.

    Attributes:
        metrics: the metrics of the latest report of rank 0, which may be a report without a checkpoint; empty if rank 0
            has not reported.
        storage: the run directory.
        error: the error that ended the run; None without an error.
        return_value: the return value of the train function on rank 0.
        completed: True if the run has nothing left to do: the train function has finished on every rank, or the stop
            condition was met. False if the run failed, was interrupted or cancelled, or is still running.
    """

    metrics: dict[str, Any]
    storage: Storage
    error: Exception | None = None
    return_value: Any = None
    completed: bool = False

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None) -> Result:
        """Read the result of a run from its directory. The run may have finished or failed, or may still be running.

        Nothing in the directory is unpickled or executed, so reading a directory from an untrusted source is safe.

        Args:
            path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
            storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to select it by the path.

        Raises:
            StorageError: the directory contains no run, a newer version of drivetrain wrote the run, or the file that
                the message names is damaged.
            ConfigurationError: the path is not valid, or a package that its filesystem requires is not installed.
        """
        storage = Storage(*locate(path, storage_filesystem, what="Result.from_path"))
        storage.require_known_version()
        if storage.read_json(RUN_FILE) is None:
            raise StorageError(
                f"[DT-703] Result.from_path: expected a run directory with {RUN_FILE}, got {redact(os.fspath(path))}"
            )
        return cls(
            metrics=last_metrics(storage),
            storage=storage,
            error=_read_error(storage),
            completed=_is_completed(storage),
        )

    @property
    def path(self) -> str:
        """The path of the run directory on its filesystem."""
        return self.storage.root

    @property
    def log_dir(self) -> Path:
        """``path`` as a :class:`pathlib.Path`."""
        return Path(self.path)

    @property
    def filesystem(self) -> Any:
        """The fsspec or pyarrow filesystem of ``path``."""
        return self.storage.filesystem.handle

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The latest committed checkpoint; None if there is none."""
        entries = self._entries()
        return self._checkpoint(entries[-1]) if entries else None

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """The kept checkpoints, oldest first, each with the metrics that were reported with it."""
        return [(self._checkpoint(entry), dict(entry.metrics)) for entry in self._entries()]

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """All reports of rank 0 as a data frame with one row per report. Requires pandas.

        Each access reads the reports again. Nested metrics are columns with names such as ``eval/accuracy``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"metrics_dataframe requires pandas, which is not installed ({error}). Run: pip install pandas",
                name=error.name,
            ) from error

        return pd.DataFrame.from_records([flatten(report) for report in _read_reports(self.storage)])

    def get_best_checkpoint(self, metric: str, mode: Literal["max", "min"] = "max") -> Checkpoint | None:
        """Return the kept checkpoint with the best value of a metric.

        Args:
            metric: the name of the metric, ``outer/inner`` for a nested metric.
            mode: ``"max"`` if larger values are better, ``"min"`` if smaller values are.

        Returns:
            The checkpoint; None if no kept checkpoint has the metric.

        Raises:
            ValueError: the mode is neither ``"max"`` nor ``"min"``.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"get_best_checkpoint(mode=...): expected 'max' or 'min', got {mode!r}")
        candidates = [entry for entry in self._entries() if has_metric(entry.metrics, metric)]
        return self._checkpoint(rank_checkpoints(candidates, metric, mode)[0]) if candidates else None

    def plot(self, *metrics: str, ranks: Sequence[int] | None = None, log: bool = False) -> Figure:
        """Plot metrics over the reports, with a panel for each metric and a line for each rank. Requires matplotlib.

        If there are more reports than the figure can show, the line is the mean of neighboring reports, inside a band
        from the minimum to the maximum of these reports.

        Args:
            metrics: the names of metrics, ``outer/inner`` for nested metrics; by default all metrics that are numbers.
            ranks: the ranks to plot; None for all ranks.
            log: True for a logarithmic value axis.

        Returns:
            A matplotlib figure, which notebooks display; ``figure.savefig("loss.png")`` saves it.

        Raises:
            ValueError: none of the ranks reported one of the metrics as a number.
            ModuleNotFoundError: matplotlib is not installed.
        """
        figure: Figure = self.view("plot", metrics=metrics, ranks=ranks, log=log)
        return figure

    def write_report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML report about the run: attempts, failures, curves and checkpoints.

        The page makes no network requests.

        Args:
            path: the file to write; missing parent directories are created.

        Raises:
            OSError: the file cannot be written.
        """
        self.view("page", path=Path(path))

    def view(self, name: str, **options: Any) -> Any:
        """Show the run with an installed view, a plugin in the group ``drivetrain.views``.

        Args:
            name: the name of the view, such as ``"plot"`` or ``"page"``.
            options: the options of the view.

        Returns:
            What the view returns.

        Raises:
            PluginNotFoundError: the view is not installed. The message names the package to install, if it is known.
        """
        return load_plugin("view", name)(self.storage, **options)

    def __str__(self) -> str:
        width = max(map(len, self._rows))
        lines = [f"  {name:<{width}}  {printable_text(str(value))}" for name, value in self._rows.items()]
        return "\n".join([self._title, *lines])

    def _repr_html_(self) -> str:
        return as_table(self._title, self._rows)

    @property
    def _title(self) -> str:
        if self.error:
            return "Result: failed"
        return "Result" if self.completed else "Result: not completed"

    @property
    def _rows(self) -> dict[str, object]:
        """The values that notebooks and ``print`` show, by name."""
        rows: dict[str, object] = {"path": self.path}
        if self.error is not None:
            rows["error"] = str(self.error).partition("\n")[0]
        rows |= writable(reported_metrics(self.metrics))
        try:
            rows["checkpoints"] = ", ".join(entry.name for entry in self._entries()) or "none"
        except (CheckpointError, StorageError) as error:  # printing a result must not raise
            rows["checkpoints"] = f"cannot be read: {error}"
        return rows

    def _entries(self) -> list[CommittedCheckpoint]:
        return read_manifest(self.storage)

    def _checkpoint(self, entry: CommittedCheckpoint) -> Checkpoint:
        return checkpoint_in(self.storage, entry.name)


def last_metrics(storage: Storage) -> dict[str, Any]:
    """Return the metrics of rank 0's last report in the run directory; an empty dict if there is none."""
    return last_report(storage) or {}


def _is_completed(storage: Storage) -> bool:
    """Return True if the last driver has recorded that the run finished; False if its record cannot be read."""
    last = None
    with contextlib.suppress(StorageError):
        for record in read_timeline(storage):
            if isinstance(record, (DriverStarted, RunEnded)):
                last = record
    return isinstance(last, RunEnded) and last.outcome == RunOutcome.FINISHED.value


def _read_error(storage: Storage) -> TrainingFailedError | None:
    """Return the error that ended the run; None if there is no ``error.json``.

    Raises:
        StorageError: ``error.json`` is damaged.
    """
    fields = storage.read_json(ERROR_FILE)
    if fields is None:
        return None
    kind = fields.text("kind")
    if kind not in [known.value for known in FailureKind]:
        raise StorageError(f"{fields.where}: expected 'kind' to be a kind of failure, got {kind!r}")
    rank = None if fields.values.get("rank") is None else fields.integer("rank")
    message = printable_text(fields.text("message"))  # other code may print it unchanged, as in a traceback
    return TrainingFailedError(message, kind=FailureKind(kind), rank=rank)


def _read_reports(storage: Storage) -> Iterator[dict[str, Any]]:
    where = storage.path(result_file(0))
    with contextlib.ExitStack() as stack:
        file: BinaryIO = io.BytesIO()
        if not storage.is_local:
            file = io.BytesIO(storage.read_bytes(result_file(0)) or b"")
        else:
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(storage.open_local(result_file(0)))
        while (line := read_line(file, where)).endswith(b"\n"):  # a killed driver may have left an incomplete line
            yield Fields(parse_json(line, where), where).values
