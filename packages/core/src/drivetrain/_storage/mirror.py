"""Uploads the changes of a local directory to a storage: a driver's metrics and logs, or a worker's artifacts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import walk_local
from drivetrain._storage.layout import METRICS, draft_target, grows
from drivetrain._storage.segments import SegmentedFiles
from drivetrain._storage.transfer import Job, run_jobs
from drivetrain.errors import StorageError

__all__ = ["Mirror"]


class Mirror:
    """Uploads the new and changed files of a directory, periodically in the background and on request.

    Of files that grow, only what was added is uploaded: see :mod:`drivetrain._storage.segments`. Files that are deleted
    locally are kept in the storage. If an upload fails, ``warn`` is called, and the next periodic upload retries. If
    the last one fails, the files can be kept.

    Args:
        directory: the local directory.
        storage: the storage to upload the files to.
        prefix: the target directory in the storage; empty for the root of the storage.
        period_s: seconds between two periodic uploads.
        warn: called with a message if an upload fails.
        keeps_files: True to keep the files on this machine if the last upload fails.
        state: the path of a local file that records which files were uploaded, so that another process's mirror of the
            same directory does not upload them again; None for no such file.
        guard: called before each upload. If it raises a StorageError, nothing is uploaded.
        driver: the number of the driver of the run whose directory is uploaded. None if it is not a run directory, so
            that every file is uploaded as a whole.
    """

    def __init__(
        self,
        directory: str,
        storage: Storage,
        prefix: str,
        *,
        period_s: float,
        warn: Callable[[str], None],
        keeps_files: bool = False,
        state: str | None = None,
        guard: Callable[[], None] = lambda: None,
        driver: int | None = None,
    ) -> None:
        self._guard = guard
        self._directory = directory
        self._storage = storage.inside(prefix) if prefix else storage
        self._growing = None if driver is None else SegmentedFiles(self._storage, directory, driver, guard, warn)
        self._period_s = period_s
        self._warn = warn
        self._keeps_files = keeps_files
        self._uploaded = _UploadedFiles(state)
        self._lock = threading.Lock()
        self._warned: set[bool] = set()
        self._ended = False
        self._wakeup = threading.Event()

    def wake(self) -> None:
        """Make the background thread upload the changed files now instead of at the end of the period."""
        self._wakeup.set()

    def pull(self) -> None:
        """Continue the files that grow, of which some are downloaded."""
        if self._growing is not None:
            self._growing.pull()

    def push(self) -> None:
        """Upload the new and changed files.

        Raises:
            StorageError: a file could not be uploaded.
        """
        states = self._states()
        if self._growing is not None:
            self._growing.push(states)
            states = {name: state for name, state in states.items() if not grows(name)}
        self._push_whole(states)

    def push_before_commit(self) -> None:
        """Upload what was added to metrics and logs. This takes little time, however large the files are.

        Raises:
            StorageError: a file could not be uploaded.
        """
        if self._growing is not None:
            states = self._states()
            self._growing.push(states, before_commit=True)
            self._push_whole({name: state for name, state in states.items() if name.startswith(f"{METRICS}/")})

    def _push_whole(self, states: Mapping[str, list[int]]) -> None:
        """Upload the files that have changed."""
        with self._lock:
            changed = self._uploaded.without(states)
            if not changed:
                return
            self._guard()
            filesystem = self._storage.remote
            jobs = [
                Job(name, partial(filesystem.put_file, os.path.join(self._directory, name), self._storage.path(name)))
                for name in changed
            ]
            run_jobs(jobs, what=f"upload to {self._storage.root}", limits=self._storage.limits)
            self._uploaded.add(changed)

    def _states(self) -> dict[str, list[int]]:
        """Return the size and the time of the last change of each file, except for drafts that will be renamed."""
        return {
            name: [status.st_size, status.st_mtime_ns]
            for name, status in walk_local(self._directory)
            if self._growing is None or not _is_draft(os.path.basename(name))
        }

    def try_push(self, *, before_commit: bool = False) -> None:
        """Call :meth:`push` or :meth:`push_before_commit`.

        Warn if that fails, but not again until such an upload has succeeded.
        """
        try:
            if before_commit:
                self.push_before_commit()
            else:
                self.push()
            self._warned.discard(before_commit)
        except (StorageError, OSError) as error:
            if before_commit not in self._warned:
                self._warn(f"{error}; the upload is retried in {self._period_s:g} s")
            self._warned.add(before_commit)

    @contextlib.contextmanager
    def running(self) -> Iterator[Mirror]:
        """Upload in the background for the duration of a ``with`` block, and once more at its end."""
        thread = threading.Thread(target=self._work, daemon=True, name="drivetrain mirror")
        thread.start()
        try:
            yield self
        finally:
            self._ended = True
            self._wakeup.set()
            thread.join(self._storage.limits.deadline_s)
            try:
                self.push()
            except (StorageError, OSError) as error:
                outcome = self._keep() if self._keeps_files else "it was the last upload"
                self._warn(f"{error}; {outcome}")
            else:
                self._merge()

    def _merge(self) -> None:
        if self._growing is not None:
            try:
                self._growing.merge()
            except (StorageError, OSError) as error:
                self._warn(f"{error}; nothing is lost: files stay in segments")

    def _keep(self) -> str:
        """Copy all files to a directory that nothing deletes, and describe the outcome for a warning."""
        try:
            kept = tempfile.mkdtemp(prefix="drivetrain_unsaved_")
            shutil.copytree(self._directory, kept, symlinks=True, dirs_exist_ok=True)
        except OSError as error:
            return f"the files could not be kept on this machine either: {error}"
        return f"the files are kept in {kept} on {socket.gethostname()}"

    def _work(self) -> None:
        while not self._ended:
            self._wakeup.wait(self._period_s)
            self._wakeup.clear()
            if not self._ended:
                self.try_push()


def _is_draft(name: str) -> bool:
    return name.startswith(".") and (bool(draft_target(name)) or name.endswith(".draft"))


class _UploadedFiles:
    """Records which files were uploaded: for each file, its size and the time of its last change.

    Args:
        path: the path of a local file for the record; None to keep it in memory.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._states: dict[str, list[int]] = {}
        if path is not None:
            with contextlib.suppress(FileNotFoundError, ValueError), open(path, encoding="utf-8") as file:
                self._states = json.load(file)

    def without(self, states: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Return the files that were not uploaded in their current state."""
        return {name: state for name, state in states.items() if self._states.get(name) != state}

    def add(self, states: Mapping[str, list[int]]) -> None:
        """Record the upload of files."""
        self._states.update(states)
        if self._path is not None and states:
            with open(self._path, "w", encoding="utf-8") as file:
                json.dump(self._states, file)
