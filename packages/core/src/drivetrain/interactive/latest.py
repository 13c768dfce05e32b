"""The latest run of a :class:`~drivetrain.Trainer`, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain._driver.result import Result
from drivetrain._storage.directory import Storage
from drivetrain.config import CheckpointConfig
from drivetrain.interactive import dicts

__all__ = ["LatestRun", "as_path", "filesystem_of"]


@dataclass(slots=True)
class LatestRun:
    """The latest run of a trainer.

    Attributes:
        storage: the run directory.
        rules: which checkpoints of the run are kept.
        result: the result, once the run has succeeded.
        unstored: the values of the last checkpoint, if the run keeps no checkpoints on storage.
    """

    storage: Storage
    rules: CheckpointConfig
    result: Result | None = None
    unstored: dict[str, Any] | None = None

    def load_result(self) -> Result:
        """The metrics and checkpoints so far; of a run that has not succeeded, they are read from storage."""
        return self.result or Result.from_path(self.storage.root, filesystem_of(self.storage))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The values of the last ``save_checkpoint()``; None without any.

        Raises:
            CheckpointError: the checkpoint is a directory that :func:`~drivetrain.report` was given.
        """
        if self.unstored is not None:
            return self.unstored
        checkpoint = self.load_result().checkpoint
        if checkpoint is None:
            return None
        return dicts.load(checkpoint, "latest_checkpoint", "latest_result.checkpoint")

    def best_checkpoint_path(self) -> Path | str | None:
        """The directory of the best checkpoint by the run's rules, the most recent one by default."""
        result, metric = self.load_result(), self.rules.checkpoint_score_attribute
        best = result.get_best_checkpoint(metric, self.rules.checkpoint_score_order) if metric else None
        checkpoint = best or result.checkpoint
        if checkpoint is None:
            return None
        return Path(checkpoint.path) if checkpoint.is_local else checkpoint.path


def filesystem_of(storage: Storage) -> Any | None:
    """The filesystem of a path in a storage; None for that of this machine, which needs not be named."""
    return None if storage.is_local else storage.filesystem.handle


def as_path(storage: Storage) -> Path | str:
    """The directory of a storage: a path of this machine, or a path on the storage's filesystem."""
    return Path(storage.root) if storage.is_local else storage.root
