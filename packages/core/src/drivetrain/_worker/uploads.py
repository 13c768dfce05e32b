"""How the files of a reported checkpoint get to the storage: before ``report`` returns, or in the background.

What waits for a background upload is out of reach of whatever the train function does to its directory next: it was
copied, or moved where the function gave it away. A copy on the storage's own filesystem would be one too many, so
there the files go to their place at once.
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
from functools import partial
from typing import NamedTuple

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
    """A checkpoint on its way.

    Attributes:
        directory: its directory in the run directory.
        files: the files that were stored, by relative path; None while they are being.
        finish: stores them; None where nothing is left to do.
    """

    directory: str
    files: dict[str, StoredFile] | None
    finish: Callable[[], dict[str, StoredFile]] | None


class Uploads:
    """The uploads of one rank.

    Args:
        storage: the run directory.
        rank: whose.
        config: how many may be in flight, and whether checksums are taken.
    """

    def __init__(self, storage: Storage, rank: int, config: CheckpointConfig) -> None:
        self._storage = storage
        self._rank = rank
        self._config = config
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
        upload = self._prepare(request, request.directory or checkpoint_name(index))
        self._used.add(upload.directory)
        return upload

    def _prepare(self, request: UploadRequest, directory: str) -> Upload:
        if request.delete_local and self._is_of_run(request.checkpoint):
            request = replace(request, delete_local=False)  # the run may have to go on from it
        if request.mode is CheckpointUploadMode.NO_UPLOAD and request.function is None:
            return self._adopt(request.checkpoint, request.directory)
        if request.directory is not None:
            self._announce(request.directory)
        if request.function is not None:
            finish: Callable[[], dict[str, StoredFile]] = partial(
                self._have_uploaded, request, request.function, directory
            )
        elif request.mode is CheckpointUploadMode.ASYNC and not self._goes_at_once(request):
            finish = self._set_aside(request, directory)
        else:
            with request.checkpoint.as_directory() as source:
                files = self._put(source, directory, request.delete_local, polite=False)
            return Upload(directory, files, None)
        if request.mode is CheckpointUploadMode.ASYNC:
            return Upload(directory, None, finish)
        return Upload(directory, finish(), None)

    def begin(self, upload: Upload, deliver: Callable[[dict[str, StoredFile]], None]) -> None:
        """Finishes an upload in the background; waits first while too many are in flight."""
        finish = upload.finish
        assert finish is not None
        if not self._free.acquire(timeout=self._storage.limits.deadline_s):
            raise StorageError(
                f"waited {self._storage.limits.deadline_s:g} s (SyncConfig.sync_timeout) for one of "
                f"{self._config.max_uploads_in_flight} background uploads to finish"
            )

        def work() -> None:
            try:
                deliver(finish())
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

    def _put(self, source: str, directory: str, give_away: bool, *, polite: bool) -> dict[str, StoredFile]:
        files = self._storage.put_directory(
            source, directory, rank=self._rank, give_away=give_away, checksums=self._config.checksums, polite=polite
        )
        if give_away:
            shutil.rmtree(source, ignore_errors=True)
        return files

    def _goes_at_once(self, request: UploadRequest) -> bool:
        """Whether the files can be moved to their place, or the copy that safety needs can be the one there."""
        if not self._storage.is_local or not request.checkpoint.is_local:
            return False
        try:
            return os.stat(request.checkpoint.path).st_dev == os.stat(self._storage.root).st_dev
        except FileNotFoundError:
            return True  # which will be said when the files are looked for

    def _set_aside(self, request: UploadRequest, directory: str) -> Callable[[], dict[str, StoredFile]]:
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(request.checkpoint.as_directory())
            aside = stack.enter_context(share_directory("uploads", secrets.token_hex(8)))
            place = Storage(LocalFilesystem(), aside, self._storage.limits)
            place.put_directory(source, _FILES, give_away=request.delete_local)
            if request.delete_local:
                shutil.rmtree(source, ignore_errors=True)
            kept = stack.pop_all()

        def finish() -> dict[str, StoredFile]:
            with kept:
                return self._put(os.path.join(aside, _FILES), directory, True, polite=True)

        return finish

    def _have_uploaded(self, request: UploadRequest, function: UploadFunction, directory: str) -> dict[str, StoredFile]:
        """Stores a checkpoint with the user's own function."""
        stored = function(request.checkpoint, directory)
        if not isinstance(stored, Checkpoint):
            raise CheckpointError(
                f"checkpoint_upload_fn wants to return the Checkpoint as it is in the run directory, found {stored!r}"
            )
        files = self._adopt(stored, directory).files or {}
        if request.delete_local and request.checkpoint.is_local and request.checkpoint != stored:
            shutil.rmtree(request.checkpoint.path, ignore_errors=True)
        return files

    def _is_of_run(self, checkpoint: Checkpoint) -> bool:
        """Whether it is a checkpoint of this run, in its place."""
        name = self._name_of(checkpoint)
        return name is not None and (name in self._used or self._storage.exists(f"{name}/{LISTING_FILE}"))

    def _name_of(self, checkpoint: Checkpoint) -> str | None:
        """Its directory in the run directory; None where it is elsewhere."""
        if checkpoint.is_local != self._storage.is_local:
            return None
        if not checkpoint.is_local and checkpoint.filesystem != self._storage.filesystem.handle:
            return None
        path = posixpath.normpath(checkpoint.path)
        name = path.removeprefix(f"{posixpath.normpath(self._storage.root)}/")
        return None if name == path or is_reserved(name) else name

    def _adopt(self, checkpoint: Checkpoint, directory: str | None) -> Upload:
        """Takes a directory for a checkpoint that is in the run directory already."""
        name = self._name_of(checkpoint)
        if name is None:
            raise CheckpointError(
                "a checkpoint that is not to be uploaded wants a directory of its own in the run directory "
                f"{self._storage.root}, found {checkpoint.path}"
            )
        if directory is not None and name != directory:
            raise CheckpointError(f"the checkpoint wants to be in {directory!r} of the run directory, found {name!r}")
        if not self._storage.walk(name):
            raise CheckpointError(f"a checkpoint wants a directory with at least one file, found none in {name!r}")
        return Upload(name, {}, None)

    def _announce(self, directory: str) -> None:
        """Leaves word of a directory that no pattern tells, so that it is swept if it is never committed."""
        if directory in self._used or self._storage.exists(f"{directory}/{LISTING_FILE}"):
            raise CheckpointError(
                f"report(checkpoint_dir_name=...) wants a name that is new in the run, found {directory!r}, which a "
                "checkpoint has already"
            )
        self._storage.write_bytes(announcement(directory), b"", durable=False)
