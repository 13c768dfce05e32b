"""What a run leaves: its latest metrics, its checkpoints, its directory."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from drivetrain._base.metrics import flatten, has_metric, reported_metrics
from drivetrain._base.notebook import as_table
from drivetrain._base.printable import printable_text
from drivetrain._base.redact import redact
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import ERROR_FILE, RUN_FILE, result_file
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.reading import Fields, parse_json
from drivetrain._storage.remote import locate
from drivetrain._storage.reports import last_report, read_line
from drivetrain._storage.retention import rank_checkpoints
from drivetrain.errors import FailureKind, StorageError, TrainingFailedError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Result", "last_metrics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run, as ``fit()`` returns it.

    Attributes:
        metrics: the latest metrics of rank 0, whether or not a checkpoint came with them; None without a report.
        storage: the run directory.
        error: the error that ended the run; None if it succeeded.
        return_value: what the train function returned on rank 0.
    """

    metrics: dict[str, Any] | None
    storage: Storage
    error: Exception | None = None
    return_value: Any = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None) -> Result:
        """Reads the result of a run from its directory; the run may have finished, have failed, or still go on.

        Nothing in the directory is unpickled or executed, so it may come from someone else.

        Args:
            path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
            storage_filesystem: the filesystem of pyarrow or fsspec that ``path`` is on; None for the one it names.

        Raises:
            StorageError: there is no run, a newer drivetrain wrote it, or a file is damaged, which the message names.
            ConfigurationError: the path is on a storage that cannot be used.
        """
        storage = Storage(*locate(path, storage_filesystem, what="Result.from_path"))
        storage.require_known_version()
        if storage.read_json(RUN_FILE) is None:
            raise StorageError(
                f"Result.from_path: expected a run directory with a {RUN_FILE}, found none in {redact(os.fspath(path))}"
            )
        return cls(metrics=last_metrics(storage), storage=storage, error=_read_error(storage))

    @property
    def path(self) -> str:
        """The run directory, on its filesystem."""
        return self.storage.root

    @property
    def filesystem(self) -> Any:
        """The filesystem of fsspec or pyarrow that ``path`` is on."""
        return self.storage.filesystem.handle

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that was committed last; None without any."""
        entries = self._entries()
        return self._checkpoint(entries[-1]) if entries else None

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """The checkpoints that were kept, oldest first, each with the metrics it was reported with."""
        return [(self._checkpoint(entry), dict(entry.metrics)) for entry in self._entries()]

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Every report of rank 0, a row each, read on each access. Needs pandas.

        Nested metrics are columns with names such as ``eval/accuracy``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"metrics_dataframe requires pandas, which is not installed ({error}): run pip install pandas",
                name=error.name,
            ) from error

        return pd.DataFrame.from_records([flatten(report) for report in _read_reports(self.storage)])

    def get_best_checkpoint(self, metric: str, mode: str = "max") -> Checkpoint | None:
        """The kept checkpoint with the best value of a metric.

        Args:
            metric: the metric's name; of a nested one ``outer/inner``.
            mode: ``"max"`` or ``"min"``: which end of the metric is better.

        Returns:
            None where no kept checkpoint has the metric.

        Raises:
            ValueError: the mode is none of the two.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"get_best_checkpoint(mode=...): expected 'max' or 'min', got {mode!r}")
        having = [entry for entry in self._entries() if has_metric(entry.metrics, metric)]
        return self._checkpoint(rank_checkpoints(having, metric, mode)[0]) if having else None

    def plot(self, *metrics: str, ranks: Sequence[int] | None = None, log: bool = False) -> Figure:
        """Draws metrics over the reports, a panel for each metric and a line for each rank. Needs matplotlib.

        Of more reports than can be seen, the line is their mean, in a band from the least to the greatest value.

        Args:
            metrics: their names, of nested ones ``outer/inner``; none for every number that was reported.
            ranks: whose; None for all ranks.
            log: use a logarithmic axis of values.

        Returns:
            A figure of matplotlib, which notebooks show; ``figure.savefig("loss.png")`` writes it.

        Raises:
            ValueError: a metric was not reported as a number by any of the ranks.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from drivetrain._views.curves import CurveReader, choose_curves
        from drivetrain._views.figures import draw_figure

        reader = CurveReader(self.storage)
        reader.update()
        return draw_figure(choose_curves(reader.curves(), metrics, ranks), log=log)

    def write_report(self, path: str | os.PathLike[str]) -> None:
        """Writes one HTML file about the run, which needs no network: attempts, failures, curves, checkpoints.

        Args:
            path: the file; directories above it are made.

        Raises:
            OSError: the file cannot be written.
        """
        from drivetrain._views.page import write_report

        write_report(self.storage, Path(path))

    def _repr_html_(self) -> str:
        entries = self._entries()
        rows: dict[str, object] = {"path": self.path}
        if self.error is not None:
            rows["error"] = str(self.error).partition("\n")[0]
        rows |= reported_metrics(self.metrics)
        rows["checkpoints"] = ", ".join(entry.name for entry in entries) or "none"
        return as_table("Result: failed" if self.error else "Result", rows)

    def _entries(self) -> list[CommittedCheckpoint]:
        return read_manifest(self.storage)

    def _checkpoint(self, entry: CommittedCheckpoint) -> Checkpoint:
        return checkpoint_in(self.storage, entry.name)


def last_metrics(storage: Storage) -> dict[str, Any] | None:
    """The metrics of the last report of rank 0 that is on storage; None without any."""
    return last_report(storage)


def _read_error(storage: Storage) -> TrainingFailedError | None:
    """The error that ended the run; None without ``error.json``.

    Raises:
        StorageError: the file is damaged.
    """
    fields = storage.read_json(ERROR_FILE)
    if fields is None:
        return None
    kind = fields.text("kind")
    if kind not in [known.value for known in FailureKind]:
        raise StorageError(f"{fields.where}: expected 'kind' to be that of a failure, got {kind!r}")
    rank = None if fields.values.get("rank") is None else fields.integer("rank")
    message = printable_text(fields.text("message"))  # it may be printed as it is, by a traceback for example
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
        while (line := read_line(file, where)).endswith(b"\n"):  # a kill may have left a part of a line
            yield Fields(parse_json(line, where), where).values
