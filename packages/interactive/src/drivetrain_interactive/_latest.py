"""The latest run of a :class:`~drivetrain_interactive.Trainer`, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain import CheckpointConfig, Result
from drivetrain.plugin.storage import Storage
from drivetrain_interactive import _dicts

__all__ = ["LatestRun", "as_path", "filesystem_of"]


@dataclass(slots=True)
class LatestRun:
    """The latest run of a trainer.

    Attributes:
        storage: the run directory.
        rules: the run's rules for keeping checkpoints.
        result: the result of the run; None until the run has succeeded.
        in_memory_values: the values of the last checkpoint; None unless the run keeps it in memory instead of
            in storage.
    """

    storage: Storage
    rules: CheckpointConfig
    result: Result | None = None
    in_memory_values: dict[str, Any] | None = None

    def load_result(self) -> Result:
        """Return the result of the run. If the run has not succeeded, read the result so far from storage."""
        return self.result or Result.from_path(self.storage.root, filesystem_of(self.storage))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the values of the last ``save_checkpoint()``; None if there is no checkpoint.

        Raises:
            CheckpointError: the last checkpoint was not saved by ``save_checkpoint()``, but by ``report()``.
        """
        if self.in_memory_values is not None:
            return self.in_memory_values
        checkpoint = self.load_result().checkpoint
        if checkpoint is None:
            return None
        return _dicts.load(checkpoint, "latest_checkpoint", "latest_result.checkpoint")

    def best_checkpoint_path(self) -> Path | str | None:
        """Return the directory of the run's best checkpoint; None if there is no checkpoint.

        If the run's rules define no score, the best checkpoint is the latest checkpoint.
        """
        result, metric = self.load_result(), self.rules.checkpoint_score_attribute
        best = result.get_best_checkpoint(metric, self.rules.checkpoint_score_order) if metric else None
        checkpoint = best or result.checkpoint
        if checkpoint is None:
            return None
        return Path(checkpoint.path) if checkpoint.is_local else checkpoint.path


def filesystem_of(storage: Storage) -> Any | None:
    """Return the filesystem of a storage; None for the local filesystem, which need not be specified."""
    return None if storage.is_local else storage.filesystem.handle


def as_path(storage: Storage) -> Path | str:
    """Return the directory of a storage: a local path, or a path on the filesystem of the storage."""
    return Path(storage.root) if storage.is_local else storage.root
