"""What a run leaves: its latest metrics, its checkpoints, its directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoints import CommittedCheckpoint, rank_checkpoints, read_manifest
from drivetrain.errors import StorageError, TrainingFailedError
from drivetrain.loggers.jsonfile import result_file
from drivetrain.storage import RUN_FILE, Storage

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ERROR_FILE", "Result"]

ERROR_FILE = "error.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run, as ``fit()`` returns it.

    Attributes:
        metrics: the latest metrics of rank 0, whether or not a checkpoint came with them; None without a report.
        path: the run directory.
        error: the error that ended the run; None if it succeeded.
        return_value: what the train function returned on rank 0.
    """

    metrics: dict[str, Any] | None
    path: str
    error: Exception | None = None
    return_value: Any = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Result:
        """Reads the result of a run from its directory; the run may have finished, have failed, or still go on.

        Args:
            path: the run directory.

        Raises:
            StorageError: there is no run.
        """
        storage = Storage(Path(path).expanduser().absolute())
        if storage.read_bytes(RUN_FILE) is None:
            raise StorageError(
                f"Result.from_path wants a run directory with a {RUN_FILE}, found none in {storage.root}"
            )
        error = None
        if (data := storage.read_bytes(ERROR_FILE)) is not None:
            error = TrainingFailedError(json.loads(data)["message"])
        metrics = None
        for metrics in _read_reports(storage.path(result_file(0))):  # noqa: B007 - the last one is wanted
            pass
        return cls(metrics=metrics, path=str(storage.root), error=error)

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem that ``path`` is on."""
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

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
        """Every report of rank 0, a row each; needs pandas."""
        import pandas as pd

        return pd.DataFrame.from_records(list(_read_reports(Path(self.path, result_file(0)))))

    def get_best_checkpoint(self, metric: str, mode: str = "max") -> Checkpoint | None:
        """The kept checkpoint with the best value of a metric.

        Args:
            metric: the metric's name.
            mode: ``"max"`` or ``"min"``: which end of the metric is better.

        Returns:
            None where no kept checkpoint has the metric.

        Raises:
            ValueError: the mode is none of the two.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"get_best_checkpoint(mode=...) wants 'max' or 'min', found {mode!r}")
        having = [entry for entry in self._entries() if metric in entry.metrics]
        return self._checkpoint(rank_checkpoints(having, metric, mode)[0]) if having else None

    def _entries(self) -> list[CommittedCheckpoint]:
        return read_manifest(Storage(Path(self.path)))

    def _checkpoint(self, entry: CommittedCheckpoint) -> Checkpoint:
        return Checkpoint(Path(self.path, entry.name))


def _read_reports(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # a run that was killed, or still goes on, may have written a part
                    yield json.loads(line)
    except FileNotFoundError:
        return
