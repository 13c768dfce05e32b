"""Uploads the changes of a local directory to a storage: a driver's metrics and logs, or a worker's artifacts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial

from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import walk_local
from drivetrain._storage.transfer import Job, run_jobs
from drivetrain.errors import StorageError

__all__ = ["Mirror"]


class Mirror:
    """Uploads the new and changed files of a directory, periodically in the background and on request.

    Files that are deleted locally are kept in the storage. If an upload fails, ``warn`` is called, and the next
    periodic upload retries. If the last one fails, the files can be kept.

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
    ) -> None:
        self._guard = guard
        self._state_file = state
        self._directory = directory
        self._storage = storage.inside(prefix) if prefix else storage
        self._period_s = period_s
        self._warn = warn
        self._keeps_files = keeps_files
        self._uploaded: dict[str, list[int]] = {}
        if state is not None:
            with contextlib.suppress(FileNotFoundError, ValueError), open(state, encoding="utf-8") as file:
                self._uploaded = json.load(file)
        self._lock = threading.Lock()
        self._warned = False
        self._ended = False
        self._wakeup = threading.Event()

    def wake(self) -> None:
        """Make the background thread upload the changed files now instead of at the end of the period."""
        self._wakeup.set()

    def pull(self, selects: Callable[[str], bool]) -> None:
        """Download each file in the storage for whose name a function returns True."""
        for name in self._storage.list_names()[1]:
            if selects(name):
                data = self._storage.read_bytes(name)
                with open(os.path.join(self._directory, name), "wb") as file:
                    file.write(data or b"")
                self._uploaded[name] = _state(os.path.join(self._directory, name))

    def push(self) -> None:
        """Upload the new and changed files.

        Raises:
            StorageError: a file could not be uploaded.
        """
        with self._lock:
            changed = {
                relative: [status.st_size, status.st_mtime_ns]
                for relative, status in walk_local(self._directory)
                if self._uploaded.get(relative) != [status.st_size, status.st_mtime_ns]
            }
            if not changed:
                return
            self._guard()
            filesystem = self._storage.remote
            jobs = [
                Job(name, partial(filesystem.put_file, os.path.join(self._directory, name), self._storage.path(name)))
                for name in changed
            ]
            run_jobs(jobs, what=f"upload to {self._storage.root}", limits=self._storage.limits)
            self._uploaded.update(changed)
            if self._state_file is not None:
                with open(self._state_file, "w", encoding="utf-8") as file:
                    json.dump(self._uploaded, file)

    def try_push(self) -> None:
        """Upload the new and changed files. Warn if that fails, but not again until an upload has succeeded."""
        try:
            self.push()
            self._warned = False
        except (StorageError, OSError) as error:
            if not self._warned:
                self._warn(f"{error}; the upload is retried in {self._period_s:g} s")
            self._warned = True

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


def _state(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
