"""Commit and retention.

**How a checkpoint is committed.** The ranks have uploaded their files to ``checkpoint_<index>/``. The controller
checks that no two ranks disagree about a file, writes the list of files into the directory, and then replaces
``manifest.json`` atomically. That replacement is the commit: what the manifest does not list does not exist, and is
swept before the next attempt. Checkpoints that retention drops leave the manifest in the same replacement, and are
deleted after it, by a thread that first has the new one flushed to the disk.

Each directory's own list says everything that the manifest says about it, so a manifest that is lost is made again from
the directories whose files verify.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, unquote

from drivetrain._base.crashpoints import reach
from drivetrain._storage.checkpoint import LISTING_FILE, VERSION, Checkpoint, own_files, parse_listing
from drivetrain._storage.directory import Storage, StoredFile
from drivetrain.config import CheckpointConfig
from drivetrain.errors import CheckpointError, StorageError

__all__ = [
    "MANIFEST",
    "CheckpointManager",
    "CommittedCheckpoint",
    "announcement",
    "checkpoint_name",
    "rank_checkpoints",
    "read_manifest",
]

MANIFEST = "manifest.json"
PENDING = ".pending"
"""Where the names of directories are left that no pattern tells, while they are yet to be committed or deleted."""

_CHECKPOINT_NAME = re.compile(r"checkpoint_(\d{6,})")
_END_WAIT_S = 1.0
_DELETIONS_AHEAD = 4


def checkpoint_name(index: int) -> str:
    """The directory of the checkpoint that belongs to a report, by the report's index in the run."""
    return f"checkpoint_{index:06d}"


def announcement(name: str) -> str:
    """The file that tells a sweep of a checkpoint's directory that no pattern tells."""
    return f"{PENDING}/{quote(name, safe='')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedCheckpoint:
    """An entry of the manifest.

    Attributes:
        name: the checkpoint's directory in the run directory.
        index: the index in the run of the report that it came with.
        iteration: the ``_training_iteration`` of that report.
        metrics: the metrics of that report.
        time: Unix time in seconds of the commit.
        ordinal: how many checkpoints the run had committed with it.
    """

    name: str
    index: int
    iteration: int
    metrics: Mapping[str, Any]
    time: float
    ordinal: int = 0


class CheckpointManager:
    """The committed checkpoints of a run.

    Args:
        storage: the run directory.
        config: which checkpoints are kept.
        metadata: the trainer's metadata, which every checkpoint carries.
        warn: told in a line about damage that was found, and what could not be deleted.
        before_commit: called before each; what it raises prevents it.
    """

    def __init__(
        self,
        storage: Storage,
        config: CheckpointConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = lambda line: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_commit = before_commit
        self._storage = storage
        self._config = config or CheckpointConfig()
        self._metadata = dict(metadata or {})
        self._warn = warn
        self.committed: list[CommittedCheckpoint] = read_manifest(storage, warn)
        self._encoded: dict[str, str] = {}
        self._damaged: set[str] = set()
        self._janitor = _Janitor(storage, warn)

    @property
    def latest(self) -> CommittedCheckpoint | None:
        """The newest checkpoint, as far as none was found to be damaged."""
        return next((entry for entry in reversed(self.committed) if entry.name not in self._damaged), None)

    @property
    def last_index(self) -> int:
        """The highest report index that a committed checkpoint has; 0 without any."""
        return self.committed[-1].index if self.committed else 0

    def checkpoint(self, entry: CommittedCheckpoint) -> Checkpoint:
        """The files of a committed checkpoint."""
        return Checkpoint.in_storage(self._storage, entry.name)

    def verify(self) -> CommittedCheckpoint | None:
        """Finds the newest checkpoint whose files are all there and complete, and says which were not."""
        while (entry := self.latest) is not None:
            try:
                self.checkpoint(entry).verify()
                return entry
            except CheckpointError as error:
                damage = str(error)
            except StorageError as error:
                if error.__cause__ is not None and not isinstance(error.__cause__, (ValueError, KeyError, TypeError)):
                    raise  # the storage cannot be read at all
                damage = str(error)
            self._damaged.add(entry.name)
            self._warn(f"{damage}; it is left as it is, and the one before it is used")
        return None

    def commit(
        self,
        *,
        index: int,
        iteration: int,
        files: Mapping[int, Mapping[str, StoredFile]],
        metrics: Mapping[str, Any],
        name: str | None = None,
    ) -> CommittedCheckpoint:
        """Commits what the ranks uploaded for a report, and applies retention.

        A rank that was not waited for may add its files to a checkpoint that is committed already.

        Args:
            index: the report's index in the run.
            iteration: the report's iteration.
            files: the files of each rank, by relative path.
            metrics: the report's metrics.
            name: the directory; None for the one that the index gives.

        Raises:
            CheckpointError: two ranks uploaded different content under one path.
            StorageError: the manifest could not be written; nothing is committed then.
        """
        name = name or checkpoint_name(index)
        self._storage.settle_duplicates(name, files)
        known = next((entry for entry in self.committed if entry.name == name), None)
        if known and known.index != index:
            raise CheckpointError(
                f"a checkpoint wants a directory that is new in the run, found {name!r}, which is committed already"
            )
        merged = self._listed(name) if known else {}
        merged |= {path: facts for rank in sorted(files) for path, facts in files[rank].items()}
        if not all(files.values()):  # a rank uploaded nothing, as it was in place
            merged = {path: StoredFile(size) for path, size in self._storage.walk(name).items()} | merged
        if self._metadata:
            checkpoint = Checkpoint.in_storage(self._storage, name)
            checkpoint.set_metadata({**self._metadata, **checkpoint.get_metadata()})
        entry = known or CommittedCheckpoint(
            name=name,
            index=index,
            iteration=iteration,
            metrics=dict(metrics),
            time=time.time(),
            ordinal=max((entry.ordinal for entry in self.committed), default=0) + 1,
        )
        self._before_commit()  # as a list without a manifest counts too
        listing = {"version": VERSION, "entry": asdict(entry), "files": dict(sorted(own_files(merged).items()))}
        self._storage.write_bytes(f"{name}/{LISTING_FILE}", json.dumps(listing).encode(), durable=False)
        if known:
            return known
        entries = sorted([*self.committed, entry], key=lambda entry: entry.index)
        kept = retained(entries, self._config, self._is_protected)
        names = {old.name for old in kept}
        dropped = [old for old in entries if old.name not in names]
        self._replace(kept, dropped)
        if name != checkpoint_name(index) and entry in kept:
            self._storage.delete(announcement(name))
        return entry

    def _replace(self, kept: list[CommittedCheckpoint], dropped: Sequence[CommittedCheckpoint]) -> None:
        """Commits a manifest, and has the directories of what is no longer in it deleted."""
        for old in dropped:
            if not _CHECKPOINT_NAME.fullmatch(old.name):
                self._storage.write_bytes(announcement(old.name), b"", durable=False)
        self._before_commit()
        reach("before manifest write")
        self._write_manifest(kept)
        reach("after manifest write")
        self.committed = kept
        if dropped:
            for old in dropped:
                self._encoded.pop(old.name, None)
            self._janitor.submit(self.last_name, [old.name for old in dropped])

    def _leftovers(self) -> tuple[list[str], list[str]]:
        """The directories that are to be deleted, and the names of all that were announced."""
        names = {entry.name for entry in self.committed}
        directories, _ = self._storage.list_names()
        orphans = [name for name in directories if _CHECKPOINT_NAME.fullmatch(name) and name not in names]
        announced = [unquote(file) for file in self._storage.list_names(PENDING)[1]] if PENDING in directories else []
        orphans += [name for name in announced if name.partition("/")[0] in directories and name not in names]
        return orphans, announced

    @property
    def last_name(self) -> str:
        """The directory of the checkpoint with the highest index; empty without any."""
        return self.committed[-1].name if self.committed else ""

    def sweep(self) -> tuple[list[str], int]:
        """Deletes checkpoint directories that were never committed, or that retention has dropped.

        Returns:
            Their names, and the highest report index among them, which must not be used again: a worker of a node
            that is lost may still be writing there.
        """
        self._janitor.wait()
        orphans, announced = self._leftovers()
        deleted = []
        for name in orphans:
            reach("during sweep")
            if Checkpoint.in_storage(self._storage, name).delete_unless_held():
                deleted.append(name)
        for name in announced:
            if name in deleted or name not in orphans:
                self._storage.delete(announcement(name))
        numbers = [int(match[1]) for name in orphans if (match := _CHECKPOINT_NAME.fullmatch(name))]
        return deleted, max(numbers, default=0)

    def leftovers(self) -> list[str]:
        """The directories that :meth:`sweep` would delete."""
        return self._leftovers()[0]

    def droppable(self, config: CheckpointConfig) -> list[CommittedCheckpoint]:
        """The committed checkpoints that other rules than the run's own would drop, oldest first."""
        names = {entry.name for entry in retained(self.committed, config, self._is_protected)}
        return [entry for entry in self.committed if entry.name not in names]

    def drop(self, entries: Sequence[CommittedCheckpoint]) -> None:
        """Takes checkpoints out of the manifest, and has them deleted.

        Raises:
            StorageError: the manifest could not be written; nothing is dropped then.
        """
        if entries:
            names = {entry.name for entry in entries}
            self._replace([entry for entry in self.committed if entry.name not in names], entries)

    def close(self) -> None:
        """Waits until what retention has dropped is deleted."""
        self._janitor.close()

    def _is_protected(self, entry: CommittedCheckpoint) -> bool:
        checkpoint = self.checkpoint(entry)
        return checkpoint.is_held() or checkpoint.is_pinned()

    def _listed(self, name: str) -> dict[str, StoredFile]:
        data = self._storage.read_bytes(f"{name}/{LISTING_FILE}")
        where = self._storage.path(name, LISTING_FILE)
        if data is None:
            raise StorageError(f"{where} wants the list of a checkpoint's files, found none")
        return parse_listing(data, where)[0]

    def _write_manifest(self, entries: Sequence[CommittedCheckpoint]) -> None:
        for entry in entries:
            if entry.name not in self._encoded:
                self._encoded[entry.name] = json.dumps(asdict(entry))
        body = ",\n".join(self._encoded[entry.name] for entry in entries)
        manifest = f'{{"version": {VERSION}, "checkpoints": [\n{body}\n]}}\n'
        self._storage.write_bytes(MANIFEST, manifest.encode(), midway=lambda: reach("during manifest write"))


class _Janitor:
    """Deletes dropped checkpoints on a thread of its own, after what replaces them is on the disk."""

    def __init__(self, storage: Storage, warn: Callable[[str], None]) -> None:
        self._storage = storage
        self._warn = warn
        self._work: queue.Queue[tuple[str, list[str]] | None] = queue.Queue(_DELETIONS_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def submit(self, newest: str, dropped: list[str]) -> None:
        """Has checkpoints deleted; waits while too many are left to delete already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="drivetrain retention")
            self._thread.start()
        try:
            self._work.put((newest, dropped), timeout=self._storage.limits.deadline_s)
        except queue.Full:
            raise StorageError(
                f"waited {self._storage.limits.deadline_s:g} s (SyncConfig.sync_timeout) for checkpoints in "
                f"{self._storage.root} to be deleted"
            ) from None

    def wait(self) -> None:
        """Waits until everything that was submitted is done, and says what could not be deleted."""
        if self._thread is None:
            return
        deadline = time.monotonic() + self._storage.limits.deadline_s
        with self._work.all_tasks_done:
            while self._work.unfinished_tasks and (remaining := deadline - time.monotonic()) > 0:
                self._work.all_tasks_done.wait(remaining)
        if self._error is not None:
            self._warn(self._error)
            self._error = None

    def close(self) -> None:
        """Waits as well, and ends the thread; one that takes longer than that ends after what it is at."""
        self.wait()
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._work.put_nowait(None)
            self._thread.join(_END_WAIT_S)
        self._thread = None

    def _run(self) -> None:
        held: list[str] = []
        while (work := self._work.get()) is not None:
            newest, dropped = work
            try:
                self._storage.flush_to_disk(newest)
                reach("during retention")
                held = [name for name in [*held, *dropped] if not self._delete(name)]
            except Exception as error:  # deleting is no reason to lose the run
                self._error = f"a dropped checkpoint could not be deleted, the next start of the run will: {error}"
            finally:
                self._work.task_done()
        self._work.task_done()

    def _delete(self, name: str) -> bool:
        if not Checkpoint.in_storage(self._storage, name).delete_unless_held():
            return False
        if not _CHECKPOINT_NAME.fullmatch(name):
            self._storage.delete(announcement(name))
        return True


def retained(
    entries: Sequence[CommittedCheckpoint],
    config: CheckpointConfig,
    is_protected: Callable[[CommittedCheckpoint], bool] = lambda entry: False,
) -> list[CommittedCheckpoint]:
    """The checkpoints that are kept.

    Args:
        entries: all of them, oldest first.
        config: the rules.
        is_protected: whether one that the rules would drop is to be kept all the same.
    """
    if config.num_to_keep is None:
        return list(entries)
    attribute, order = config.checkpoint_score_attribute, config.checkpoint_score_order
    best = rank_checkpoints(entries, attribute, order) if attribute else list(reversed(entries))
    keep = {entry.name for entry in [*best[: config.num_to_keep], *entries[-config.keep_last :]]}
    if config.keep_every is not None:
        keep |= {entry.name for entry in entries if entry.ordinal % config.keep_every == 0}
    return [entry for entry in entries if entry.name in keep or is_protected(entry)]


def read_manifest(storage: Storage, warn: Callable[[str], None] = lambda line: None) -> list[CommittedCheckpoint]:
    """The committed checkpoints of a run, oldest first; none where there are none.

    Where the manifest is damaged or missing, they are found by the lists in their directories.

    Args:
        storage: the run directory.
        warn: told in a line if that was necessary.

    Raises:
        StorageError: the manifest is of a newer drivetrain.
    """
    data = storage.read_bytes(MANIFEST)
    where = storage.path(MANIFEST)
    damage = "is missing"
    if data is not None:
        try:
            manifest = json.loads(data)
            if manifest["version"] > VERSION:
                raise StorageError(
                    f"{where} was written by a newer drivetrain (manifest version {manifest['version']}, this one "
                    f"reads up to {VERSION}): upgrade drivetrain"
                )
            return [CommittedCheckpoint(**entry) for entry in manifest["checkpoints"]]
        except (ValueError, KeyError, TypeError) as error:
            damage = f"is damaged ({error!r})"
    found = _find_complete(storage)
    if found or data is not None:
        names = ", ".join(entry.name for entry in found[-3:]) or "none"
        warn(f"{where} {damage}: {len(found)} checkpoints were found by their own lists, the newest being {names}")
    return found


def _find_complete(storage: Storage) -> list[CommittedCheckpoint]:
    found = []
    for name in storage.list_names()[0]:
        data = storage.read_bytes(f"{name}/{LISTING_FILE}")
        if data is None:
            continue
        try:
            files, entry = parse_listing(data, storage.path(name, LISTING_FILE))
            if storage.find_damage(name, files) is None:
                found.append(CommittedCheckpoint(**entry))
        except (StorageError, TypeError):
            continue
    return sorted(found, key=lambda entry: entry.index)


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
