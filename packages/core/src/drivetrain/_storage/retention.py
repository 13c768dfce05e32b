"""Selects the checkpoints to keep, and deletes the others."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

from drivetrain._base.crashpoints import reach
from drivetrain._base.metrics import find_metric, flatten
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.holds import delete_unless_held
from drivetrain._storage.layout import CHECKPOINT_NAME_PATTERN, announcement_name
from drivetrain._storage.reading import is_number
from drivetrain.config import CheckpointConfig
from drivetrain.errors import StorageError

__all__ = ["Janitor", "is_finite", "rank_checkpoints", "retained"]

_END_WAIT_S = 1.0
_DELETIONS_AHEAD = 4


class Janitor:
    """Deletes dropped checkpoints on a separate thread, after the newest checkpoint has been flushed to the disk."""

    def __init__(self, storage: Storage, warn: Callable[[str], None]) -> None:
        self._storage = storage
        self._warn = warn
        self._work: queue.Queue[tuple[str, list[str]] | None] = queue.Queue(_DELETIONS_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def submit(self, newest: str, dropped: list[str]) -> None:
        """Schedule the deletion of checkpoints. Block while too many deletions are pending.

        Args:
            newest: the directory of the newest checkpoint, which is flushed to the disk first.
            dropped: the directories of the checkpoints to delete.

        Raises:
            StorageError: the pending deletions took too long.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True, name="drivetrain retention")
            thread.start()
            self._thread = thread
        try:
            self._work.put((newest, dropped), timeout=self._storage.limits.deadline_s)
        except queue.Full:
            raise StorageError(
                f"[DT-405] {self._storage.root}: expected the pending deletions of checkpoints to take at most "
                f"{self._storage.limits.deadline_s:g} s (SyncConfig.sync_timeout)"
            ) from None

    def wait(self) -> None:
        """Wait for the pending deletions, and warn if one failed."""
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
        """Wait for the pending deletions, and end the thread. A slow thread ends only after its current deletion."""
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
            except Exception as error:  # a failed deletion must not end the run
                self._error = f"cannot delete a dropped checkpoint; the next start of the run retries: {error}"
            finally:
                self._work.task_done()
        self._work.task_done()

    def _delete(self, name: str) -> bool:
        if not delete_unless_held(self._storage, name):
            return False
        if not CHECKPOINT_NAME_PATTERN.fullmatch(name):
            self._storage.delete(announcement_name(name))
        return True


def retained(
    entries: Sequence[CommittedCheckpoint],
    config: CheckpointConfig,
    is_protected: Callable[[CommittedCheckpoint], bool] = lambda entry: False,
) -> list[CommittedCheckpoint]:
    """Return the checkpoints to keep.

    Args:
        entries: all checkpoints, oldest first.
        config: the retention rules.
        is_protected: returns True for a checkpoint that is kept even if the rules would drop it.
    """
    if config.num_to_keep is None:
        return list(entries)
    attribute, order = config.checkpoint_score_attribute, config.checkpoint_score_order
    best = rank_checkpoints(entries, attribute, order) if attribute else list(reversed(entries))
    latest_finite = [entry for entry in entries if is_finite(entry, attribute)][-1:]
    keep = {entry.name for entry in [*best[: config.num_to_keep], *entries[-config.keep_last :], *latest_finite]}
    if config.keep_every is not None:
        keep |= {entry.name for entry in entries if entry.ordinal % config.keep_every == 0}
    return [entry for entry in entries if entry.name in keep or is_protected(entry)]


def is_finite(entry: CommittedCheckpoint, attribute: str | None) -> bool:
    """Return True if the metrics of a checkpoint show no sign that the training has diverged.

    Args:
        entry: the checkpoint.
        attribute: the metric whose value must be a finite number; None if no metric may be NaN.
    """
    if attribute is not None:
        return is_number(find_metric(entry.metrics, attribute))
    return all(value == value for value in flatten(entry.metrics).values())  # only NaN differs from itself


def rank_checkpoints(entries: Sequence[CommittedCheckpoint], metric: str, mode: str) -> list[CommittedCheckpoint]:
    """Sort checkpoints by a metric, best first. Among equal checkpoints, the latest comes first.

    Checkpoints come last if they do not have the metric, or if its value is NaN.

    Args:
        entries: the checkpoints, in any order.
        metric: the name of the metric; a nested metric is named ``outer/inner``.
        mode: ``"max"`` if higher values are better, else ``"min"``.
    """

    def score(entry: CommittedCheckpoint) -> tuple[bool, float, int]:
        value = find_metric(entry.metrics, metric)
        if not isinstance(value, (int, float)) or value != value:  # NaN; math.isnan() raises for a huge integer
            return (False, 0.0, entry.number)
        return (True, value if mode == "max" else -value, entry.number)

    return sorted(entries, key=score, reverse=True)
