"""Commit and retention.

**How a checkpoint is committed.** The ranks have uploaded their files to ``checkpoint_<index>/``. The controller
checks that no two ranks disagree about a file, writes the list of files into the directory, and then replaces
``manifest.json`` atomically. That replacement is the commit: what the manifest does not list does not exist, and is
swept before the next attempt. Checkpoints that retention drops leave the manifest in the same replacement, and are
deleted after it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.checkpoint import Checkpoint
from drivetrain.config import CheckpointConfig
from drivetrain.errors import StorageError
from drivetrain.session import checkpoint_name
from drivetrain.storage import Storage

__all__ = ["MANIFEST", "CheckpointManager", "CommittedCheckpoint", "rank_checkpoints"]

MANIFEST = "manifest.json"
FILE_LIST = ".files.json"
VERSION = 1

_CHECKPOINT_NAME = re.compile(r"checkpoint_\d{6,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedCheckpoint:
    """An entry of the manifest.

    Attributes:
        name: the checkpoint's directory in the run directory.
        index: the index in the run of the report that it came with.
        iteration: the ``_training_iteration`` of that report.
        metrics: the metrics of that report.
        time: Unix time in seconds of the commit.
    """

    name: str
    index: int
    iteration: int
    metrics: Mapping[str, Any]
    time: float


class CheckpointManager:
    """The committed checkpoints of a run.

    Args:
        storage: the run directory.
        config: which checkpoints are kept.
        metadata: the trainer's metadata, which every checkpoint carries.
    """

    def __init__(
        self, storage: Storage, config: CheckpointConfig | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._storage = storage
        self._config = config or CheckpointConfig()
        self._metadata = dict(metadata or {})
        self.committed: list[CommittedCheckpoint] = read_manifest(storage)

    @property
    def latest(self) -> CommittedCheckpoint | None:
        """The checkpoint that was committed last."""
        return self.committed[-1] if self.committed else None

    def checkpoint(self, entry: CommittedCheckpoint) -> Checkpoint:
        """The files of a committed checkpoint."""
        return Checkpoint(self._storage.path(entry.name))

    def commit(
        self, *, index: int, iteration: int, files: dict[int, dict[str, int]], metrics: Mapping[str, Any]
    ) -> CommittedCheckpoint:
        """Commits what the ranks uploaded for a report, and applies retention.

        A rank that was not waited for may add its files to a checkpoint that is committed already.

        Args:
            index: the report's index in the run.
            iteration: the report's iteration.
            files: the sizes in bytes of the files of each rank, by relative path.
            metrics: the report's metrics.

        Raises:
            CheckpointError: two ranks uploaded different content under one path.
            StorageError: the manifest could not be written; nothing is committed then.
        """
        name = checkpoint_name(index)
        self._storage.settle_duplicates(name, files)
        known = next((entry for entry in self.committed if entry.name == name), None)
        merged = read_file_list(self._storage, name) if known else {}
        merged |= {path: size for rank in sorted(files) for path, size in files[rank].items()}
        if self._metadata:
            checkpoint = Checkpoint(self._storage.path(name))
            checkpoint.set_metadata({**self._metadata, **checkpoint.get_metadata()})
        listing = {"version": VERSION, "files": dict(sorted(merged.items()))}
        self._storage.write_bytes(f"{name}/{FILE_LIST}", json.dumps(listing).encode())
        if known:
            return known
        entry = CommittedCheckpoint(
            name=name, index=index, iteration=iteration, metrics=dict(metrics), time=time.time()
        )
        kept = self._retained([*self.committed, entry])
        self._write_manifest(kept)
        dropped = [old for old in self.committed if old not in kept]
        self.committed = kept
        for old in dropped:
            self._storage.delete(old.name)
        return entry

    def sweep(self) -> list[str]:
        """Deletes checkpoint directories that were never committed, and returns their names."""
        names = {entry.name for entry in self.committed}
        orphans = [
            name for name in self._storage.list_directories() if _CHECKPOINT_NAME.fullmatch(name) and name not in names
        ]
        for name in orphans:
            self._storage.delete(name)
        return orphans

    def _retained(self, entries: Sequence[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
        if self._config.num_to_keep is None or len(entries) <= self._config.num_to_keep:
            return list(entries)
        attribute, order = self._config.checkpoint_score_attribute, self._config.checkpoint_score_order
        best = rank_checkpoints(entries, attribute, order) if attribute else list(reversed(entries))
        keep = {entry.name for entry in best[: self._config.num_to_keep]} | {entries[-1].name}
        return [entry for entry in entries if entry.name in keep]

    def _write_manifest(self, entries: Sequence[CommittedCheckpoint]) -> None:
        manifest = {"version": VERSION, "checkpoints": [asdict(entry) for entry in entries]}
        self._storage.write_bytes(MANIFEST, json.dumps(manifest).encode())


def read_manifest(storage: Storage) -> list[CommittedCheckpoint]:
    """The committed checkpoints of a run, oldest first; none where there is no manifest.

    Raises:
        StorageError: the manifest is none that this version can read.
    """
    data = storage.read_bytes(MANIFEST)
    if data is None:
        return []
    where = storage.path(MANIFEST)
    try:
        manifest = json.loads(data)
        version = manifest["version"]
        if version > VERSION:
            raise StorageError(
                f"{where} was written by a newer drivetrain (manifest version {version}, this one reads up to "
                f"{VERSION}): upgrade drivetrain"
            )
        return [CommittedCheckpoint(**entry) for entry in manifest["checkpoints"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{where} wants a checkpoint manifest, found something else: {error!r}") from error


def read_file_list(storage: Storage, name: str) -> dict[str, int]:
    """The sizes in bytes of a committed checkpoint's files, by relative path.

    Raises:
        StorageError: the list is missing, or none that this version can read.
    """
    where = storage.path(name, FILE_LIST)
    try:
        files: dict[str, int] = json.loads(where.read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{where} wants the list of a checkpoint's files, found something else: {error!r}"
        ) from error
    return files


def rank_checkpoints(entries: Sequence[CommittedCheckpoint], metric: str, mode: str) -> list[CommittedCheckpoint]:
    """Sorts checkpoints by a metric, best first; those without it, or with NaN, come last; later ones win ties.

    Args:
        entries: the checkpoints, oldest first.
        metric: the metric's name.
        mode: ``"max"`` or ``"min"``: which end of the metric is better.
    """

    def score(entry: CommittedCheckpoint) -> tuple[bool, float, int]:
        value = entry.metrics.get(metric)
        if not isinstance(value, (int, float)) or math.isnan(value):
            return (False, 0.0, entry.index)
        return (True, value if mode == "max" else -value, entry.index)

    return sorted(entries, key=score, reverse=True)
