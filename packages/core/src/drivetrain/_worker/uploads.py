"""How the files of a reported checkpoint get to the storage: before ``report`` returns, or in the background.

There are four ways, one class each:

- :class:`_InPlace`: the files are in the run directory already.
- :class:`_FromSource`: they are copied or moved from the reported directory before ``report`` returns. An asynchronous
  report uses it too if the storage is on the same filesystem, because a private copy would take as long.
- :class:`_FromPrivateCopy`: they are first copied to a private directory (or moved there if the train function gave
  them away) and stored from there in the background. The train function may change its directory meanwhile.
- :class:`_ByFunction`: the user's function stores them.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import LocalFilesystem, StoredFile
from drivetrain._storage.layout import LISTING_FILE, announcement, checkpoint_name, is_reserved
from drivetrain._storage.node import share_directory
from drivetrain.config import CheckpointConfig, CheckpointUploadMode
from drivetrain.errors import CheckpointError, StorageError

__all__ = ["Upload", "UploadRequest", "Uploads"]

UploadFunction = Callable[[Checkpoint, str], Checkpoint]

_FILES = "files"


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadRequest:
    """What ``report`` was asked to do with a checkpoint; see there."""

    checkpoint: Checkpoint
    directory: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    function: UploadFunction | None = None
    delete_local: bool = False


class Upload(NamedTuple):
    """A checkpoint that was reported.

    Attributes:
        directory: its directory in the run directory.
        files: the files that were stored, by relative path; None if that happens in the background.
        pending: stores them in the background; None if they are stored.
    """

    directory: str
    files: dict[str, StoredFile] | None
    pending: _Method | None


class _Method(Protocol):
    """A way to store the files of a checkpoint."""

    def store(self) -> dict[str, StoredFile]:
        """Stores the files, and returns them by relative path."""
        ...


@dataclass(frozen=True, slots=True)
class _Destination:
    """The run directory, as one rank stores checkpoints in it.

    Attributes:
        storage: the run directory.
        rank: the rank.
        checksums: whether checksums are taken.
    """

    storage: Storage
    rank: int
    checksums: bool

    def put(self, source: str, directory: str, *, give_away: bool, polite: bool) -> dict[str, StoredFile]:
        """Stores the files of a local directory, which is deleted if it may be given away."""
        files = self.storage.put_directory(
            source, directory, rank=self.rank, give_away=give_away, checksums=self.checksums, polite=polite
        )
        if give_away:
            shutil.rmtree(source, ignore_errors=True)
        return files

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """The directory of a checkpoint in the run directory, or None if it is elsewhere."""
        if checkpoint.is_local != self.storage.is_local:
            return None
        if not checkpoint.is_local and checkpoint.filesystem != self.storage.filesystem.handle:
            return None
        path = posixpath.normpath(checkpoint.path)
        name = path.removeprefix(f"{posixpath.normpath(self.storage.root)}/")
        return None if name == path or is_reserved(name) else name

    def is_on_same_filesystem(self, checkpoint: Checkpoint) -> bool:
        """Whether the files of a checkpoint can be moved here, or copied here as fast as anywhere else."""
        if not self.storage.is_local or not checkpoint.is_local:
            return False
        try:
            return os.stat(checkpoint.path).st_dev == os.stat(self.storage.root).st_dev
        except FileNotFoundError:
            return True  # storing the files raises the error


class _InPlace:
    """Uses the files of a checkpoint that is in the run directory already.

    Args:
        checkpoint: the checkpoint.
        directory: the name that it must have; None for any.
        destination: the run directory.

    Raises:
        CheckpointError: it is elsewhere, has another name, or has no files.
    """

    def __init__(self, checkpoint: Checkpoint, directory: str | None, destination: _Destination) -> None:
        name = destination.name_of(checkpoint)
        if name is None:
            raise CheckpointError(
                "report(): expected a checkpoint in a directory of its own in the run directory "
                f"{destination.storage.root}, as it is not uploaded; got {checkpoint.path}"
            )
        if directory is not None and name != directory:
            raise CheckpointError(
                f"report(): expected the checkpoint in {directory!r} of the run directory, got {name!r}"
            )
        if not destination.storage.walk(name):
            raise CheckpointError(f"report(): expected a checkpoint with at least one file, got none in {name!r}")
        self.directory = name

    def store(self) -> dict[str, StoredFile]:
        """Stores nothing; the commit lists the files."""
        return {}


@dataclass(frozen=True, slots=True)
class _FromSource:
    """Stores the files from the reported directory itself."""

    request: UploadRequest
    directory: str
    destination: _Destination

    def store(self) -> dict[str, StoredFile]:
        with self.request.checkpoint.as_directory() as source:
            return self.destination.put(source, self.directory, give_away=self.request.delete_local, polite=False)


class _FromPrivateCopy:
    """Stores the files from a private copy, which it makes at once."""

    def __init__(self, request: UploadRequest, directory: str, destination: _Destination) -> None:
        self._directory = directory
        self._destination = destination
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(request.checkpoint.as_directory())
            private = stack.enter_context(share_directory("uploads", secrets.token_hex(8)))
            copies = Storage(LocalFilesystem(), private, destination.storage.limits)
            copies.put_directory(source, _FILES, give_away=request.delete_local)
            if request.delete_local:
                shutil.rmtree(source, ignore_errors=True)
            self._source = os.path.join(private, _FILES)
            self._held = stack.pop_all()

    def store(self) -> dict[str, StoredFile]:
        """Stores the files, and deletes the private copy."""
        with self._held:
            return self._destination.put(self._source, self._directory, give_away=True, polite=True)


@dataclass(frozen=True, slots=True)
class _ByFunction:
    """Has the user's function store the files."""

    request: UploadRequest
    function: UploadFunction
    directory: str
    destination: _Destination

    def store(self) -> dict[str, StoredFile]:
        stored = self.function(self.request.checkpoint, self.directory)
        if not isinstance(stored, Checkpoint):
            raise CheckpointError(
                f"checkpoint_upload_fn: expected it to return the Checkpoint in the run directory, got {stored!r}"
            )
        files = _InPlace(stored, self.directory, self.destination).store()
        if self.request.delete_local and self.request.checkpoint.is_local and self.request.checkpoint != stored:
            shutil.rmtree(self.request.checkpoint.path, ignore_errors=True)
        return files


class Uploads:
    """The uploads of one rank.

    Args:
        storage: the run directory.
        rank: whose.
        config: how many may be in flight, and whether checksums are taken.
    """

    def __init__(self, storage: Storage, rank: int, config: CheckpointConfig) -> None:
        self._storage = storage
        self._config = config
        self._destination = _Destination(storage, rank, config.checksums)
        self._free = threading.BoundedSemaphore(config.max_uploads_in_flight)
        self._threads: list[threading.Thread] = []
        self._failures: list[Exception] = []
        self._used: set[str] = set()

    def raise_failure(self) -> None:
        """Raises the error of a background upload that failed since the last call.

        Raises:
            StorageError: the storage's error is its cause.
        """
        failures, self._failures = self._failures, []
        if failures:
            count = "a checkpoint was" if len(failures) == 1 else f"{len(failures)} checkpoints were"
            reasons = "; ".join(str(failure) or type(failure).__name__ for failure in failures)
            raise StorageError(f"{count} not stored, as the background upload failed: {reasons}") from failures[0]

    def prepare(self, request: UploadRequest, index: int) -> Upload:
        """Stores a checkpoint's files, or makes them safe for storing them in the background.

        Args:
            request: what was reported.
            index: the report's index in the run.

        Raises:
            CheckpointError: there is nothing to store, or it is in the wrong place.
            StorageError: it could not be stored.
        """
        checkpoint = request.checkpoint
        if request.delete_local and self._is_of_run(checkpoint):
            request = replace(request, delete_local=False)  # the run may have to resume from it
        if request.mode is CheckpointUploadMode.NO_UPLOAD and request.function is None:
            in_place = _InPlace(checkpoint, request.directory, self._destination)
            upload = Upload(in_place.directory, in_place.store(), None)
        else:
            if request.directory is not None:
                self._announce(request.directory)
            upload = self._prepare(request, request.directory or checkpoint_name(index))
        self._used.add(upload.directory)
        return upload

    def _prepare(self, request: UploadRequest, directory: str) -> Upload:
        in_background = request.mode is CheckpointUploadMode.ASYNC
        method: _Method
        if request.function is not None:
            method = _ByFunction(request, request.function, directory, self._destination)
        elif in_background and not self._destination.is_on_same_filesystem(request.checkpoint):
            method = _FromPrivateCopy(request, directory, self._destination)
        else:
            method = _FromSource(request, directory, self._destination)
            in_background = False
        if in_background:
            return Upload(directory, None, method)
        return Upload(directory, method.store(), None)

    def begin(self, upload: Upload, deliver: Callable[[dict[str, StoredFile]], None]) -> None:
        """Stores the files of an upload in the background; waits first if too many uploads are in flight."""
        pending = upload.pending
        assert pending is not None
        if not self._free.acquire(timeout=self._storage.limits.deadline_s):
            raise StorageError(
                f"waited {self._storage.limits.deadline_s:g} s (SyncConfig.sync_timeout) for one of "
                f"{self._config.max_uploads_in_flight} background uploads to finish"
            )

        def work() -> None:
            try:
                deliver(pending.store())
            except Exception as error:
                self._used.discard(upload.directory)
                self._failures.append(error)
            finally:
                self._free.release()

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, daemon=True, name=f"drivetrain upload {upload.directory}"))
        self._threads[-1].start()

    def drain(self) -> None:
        """Waits for the background uploads.

        Raises:
            StorageError: one of them failed, or takes too long.
        """
        for thread in self._threads:
            thread.join(self._storage.limits.deadline_s)
            if thread.is_alive():
                raise StorageError(f"{thread.name} took longer than {self._storage.limits.deadline_s:g} s")
        self.raise_failure()

    def _is_of_run(self, checkpoint: Checkpoint) -> bool:
        """Whether it is a checkpoint of this run, in its place."""
        name = self._destination.name_of(checkpoint)
        return name is not None and (name in self._used or self._storage.exists(f"{name}/{LISTING_FILE}"))

    def _announce(self, directory: str) -> None:
        """Notes the name of a directory that no pattern matches, so that it is deleted if it is never committed."""
        if directory in self._used or self._storage.exists(f"{directory}/{LISTING_FILE}"):
            raise CheckpointError(
                f"report(checkpoint_dir_name=...): expected a name that is new in the run, got {directory!r}, which "
                "another checkpoint has"
            )
        self._storage.write_bytes(announcement(directory), b"", durable=False)
