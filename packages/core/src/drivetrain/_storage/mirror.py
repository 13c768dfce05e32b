"""Copies a local directory to the storage as it changes: metrics and logs of a driver, artifacts of a worker."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import walk_local
from drivetrain._storage.transfer import Job, run_jobs
from drivetrain.errors import StorageError

__all__ = ["Mirror"]


class Mirror:
    """Uploads the files of a directory that are new or have changed, in the background every so often and on request.

    Files that are deleted locally stay in the storage. A round that fails is reported, and tried again with the next.

    Args:
        directory: the local directory.
        storage: where its files are copied to.
        prefix: the directory in the storage; empty for the storage itself.
        period_s: seconds between two rounds.
        warn: told what went wrong with a round.
        state: a file that keeps what was uploaded, for another process's mirror of the same directory.
    """

    def __init__(
        self,
        directory: str,
        storage: Storage,
        prefix: str,
        *,
        period_s: float,
        warn: Callable[[str], None],
        state: str | None = None,
    ) -> None:
        self._state_file = state
        self._directory = directory
        self._storage = storage
        self._prefix = prefix
        self._period_s = period_s
        self._warn = warn
        self._known: dict[str, list[int]] = {}
        if state is not None:
            with contextlib.suppress(FileNotFoundError, ValueError), open(state, encoding="utf-8") as file:
                self._known = json.load(file)
        self._lock = threading.Lock()
        self._warned = False
        self._ended = False
        self._woken = threading.Event()

    def wake(self) -> None:
        """Has the next round begin now."""
        self._woken.set()

    def pull(self, patterns: Sequence[str]) -> None:
        """Fetches the files of those names that the storage has."""
        for name in self._storage.list_names(self._prefix)[1]:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                data = self._storage.read_bytes(os.path.join(self._prefix, name))
                with open(os.path.join(self._directory, name), "wb") as file:
                    file.write(data or b"")
                self._known[name] = _state(os.path.join(self._directory, name))

    def push(self) -> None:
        """Uploads what has changed.

        Raises:
            StorageError: something could not be uploaded.
        """
        with self._lock:
            changed = {
                relative: [status.st_size, status.st_mtime_ns]
                for relative, status in walk_local(self._directory)
                if self._known.get(relative) != [status.st_size, status.st_mtime_ns]
            }
            if not changed:
                return
            filesystem = self._storage.filesystem
            jobs = [
                Job(name, partial(filesystem.put_file, os.path.join(self._directory, name), self._target(name)))
                for name in changed
            ]
            run_jobs(jobs, what=f"upload to {self._storage.path(self._prefix)}", limits=self._storage.limits)
            self._known.update(changed)
            if self._state_file is not None:
                with open(self._state_file, "w", encoding="utf-8") as file:
                    json.dump(self._known, file)

    def try_push(self) -> None:
        """Uploads what has changed; warns, the first time, if that fails."""
        try:
            self.push()
            self._warned = False
        except (StorageError, OSError) as error:
            if not self._warned:
                self._warn(f"{error}; this is tried again in {self._period_s:g} s")
            self._warned = True

    def _target(self, name: str) -> str:
        return self._storage.path(self._prefix, name)

    @contextlib.contextmanager
    def running(self) -> Iterator[Mirror]:
        """Uploads in the background for the time of a ``with`` block, and once more at its end."""
        thread = threading.Thread(target=self._work, daemon=True, name="drivetrain mirror")
        thread.start()
        try:
            yield self
        finally:
            self._ended = True
            self._woken.set()
            thread.join(self._storage.limits.deadline_s)
            self.try_push()

    def _work(self) -> None:
        while not self._ended:
            self._woken.wait(self._period_s)
            self._woken.clear()
            if not self._ended:
                self.try_push()


def _state(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
