"""Upload the files of a reported checkpoint to the storage, before ``report`` returns or in the background.

There are five ways to store the files, and a class for each of them:

- :class:`_InPlace`: the files are in the run directory already.
- :class:`_FromSource`: the files are copied or moved from the reported directory before ``report`` returns. An
  asynchronous report uses this class too if the reported directory is on the same filesystem as the storage, because a
  private copy would take as long as the upload.
- :class:`_FromPrivateCopy`: the files are first copied to a private directory (or moved there, if the reported
  directory will be deleted anyway) and stored from there in the background. Meanwhile, the train function may change
  the reported directory.
- :class:`_ByFunction`: the user's function stores the files.
- :class:`_FromShared`: the files of all ranks of a node are stored from the directory that the ranks share.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import LocalFilesystem, StoredFile
from drivetrain._storage.layout import LISTING_FILE, announcement_name, checkpoint_name, is_reserved
from drivetrain._storage.node import share_directory
from drivetrain._storage.upload import put_directory
from drivetrain._wire.events import CheckpointRanks
from drivetrain._worker.shared import SharedDirectory
from drivetrain.config import CheckpointConfig, CheckpointUploadMode
from drivetrain.errors import CheckpointError, SessionError, StorageError

__all__ = ["Sharing", "Upload", "UploadRequest", "Uploads"]

ClaimFunction = Callable[[str, Collection[str]], Collection[str]]
"""Called with a checkpoint's directory and the names of files; returns the names that another rank stores too."""

UploadFunction = Callable[[Checkpoint, str], Checkpoint]

_FILES = "files"


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadRequest:
    """The arguments of ``report`` for a checkpoint."""

    checkpoint: Checkpoint
    directory: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    function: UploadFunction | None = None
    delete_local: bool = False
    ranks: CheckpointRanks = None

    def options_for_own_checkpoint(self) -> list[str]:
        """Return the options of ``report`` that were passed and that a shared checkpoint does not support."""
        options = {
            f"checkpoint_dir_name={self.directory!r}": self.directory is not None,
            "checkpoint_upload_mode='none'": self.mode is CheckpointUploadMode.NO_UPLOAD,
            "checkpoint_upload_fn": self.function is not None,
            "delete_local_checkpoint_after_upload=True": self.delete_local,
        }
        return [option for option, is_passed in options.items() if is_passed]


class Upload(NamedTuple):
    """A reported checkpoint.

    Attributes:
        directory: the name of its directory in the run directory.
        files: the stored files by relative path; None if they are stored in the background.
        pending: stores the files in the background; None if they are stored already.
        ranks: see :class:`~drivetrain._wire.events.Reported`.
    """

    directory: str
    files: dict[str, StoredFile] | None
    pending: _Method | None
    ranks: CheckpointRanks = None


@dataclass(slots=True)
class Sharing:
    """A call of ``shared_checkpoint`` on this rank.

    Attributes:
        directory: the directory that the ranks share.
        cleanup: releases the directory.
        is_reported: True if this rank has reported the checkpoint.
    """

    directory: SharedDirectory
    cleanup: contextlib.ExitStack
    is_reported: bool = False


class _Method(Protocol):
    """A way to store the files of a checkpoint."""

    def store(self) -> dict[str, StoredFile]:
        """Store the files, and return them by relative path."""
        ...


@dataclass(frozen=True, slots=True)
class _Destination:
    """The run directory as a destination for one rank's checkpoints.

    Attributes:
        storage: the run directory.
        rank: the rank.
        checksums: True to compute checksums on local storage too.
        claim: finds out which files another rank stores too; None if the storage itself prevents that ranks replace
            each other's files, or if there is only one rank.
    """

    storage: Storage
    rank: int
    checksums: bool
    claim: ClaimFunction | None = None

    def put(self, source: str, directory: str, *, give_away: bool, low_priority: bool) -> dict[str, StoredFile]:
        """Store the files of a local directory; delete the directory if ``give_away`` is True."""
        files = put_directory(
            self.storage,
            source,
            directory,
            rank=self.rank,
            may_move=give_away,
            checksums=self.checksums,
            low_priority=low_priority,
            claim=self.claim,
        )
        if give_away:
            shutil.rmtree(source, ignore_errors=True)
        return files

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of a checkpoint's directory in the run directory, or None if the checkpoint is elsewhere."""
        if checkpoint.is_local != self.storage.is_local:
            return None
        if not checkpoint.is_local and checkpoint.filesystem != self.storage.filesystem.handle:
            return None
        path = posixpath.normpath(checkpoint.path)
        name = path.removeprefix(f"{posixpath.normpath(self.storage.root)}/")
        return None if name == path or is_reserved(name) else name

    def is_on_same_filesystem(self, checkpoint: Checkpoint) -> bool:
        """Return True if a checkpoint is on the same local filesystem as the run directory, so it can be moved."""
        if not self.storage.is_local or not checkpoint.is_local:
            return False
        try:
            return os.stat(checkpoint.path).st_dev == os.stat(self.storage.root).st_dev
        except FileNotFoundError:
            return True  # storing the files raises the error


class _InPlace:
    """Uses the files of a checkpoint that is already in the run directory.

    Args:
        checkpoint: the checkpoint.
        directory: the expected name of its directory; None for any name.
        destination: the run directory.

    Raises:
        CheckpointError: the checkpoint is not in the run directory, its directory has another name, or it has no files.
    """

    def __init__(self, checkpoint: Checkpoint, directory: str | None, destination: _Destination) -> None:
        name = destination.name_of(checkpoint)
        if name is None:
            raise CheckpointError(
                "[DT-805] report(): expected a checkpoint in its own directory in the run directory "
                f"{destination.storage.root}, because it is not uploaded, got {checkpoint.path}"
            )
        if directory is not None and name != directory:
            raise CheckpointError(
                f"[DT-805] report(): expected the checkpoint in {directory!r} of the run directory, got {name!r}"
            )
        if not destination.storage.walk(name):
            raise CheckpointError(
                f"[DT-408] report(): expected a checkpoint with at least one file, got no files in {name!r}"
            )
        self.directory = name

    def store(self) -> dict[str, StoredFile]:
        """Return no files, because nothing is stored. The commit lists the files in the directory."""
        return {}


@dataclass(frozen=True, slots=True)
class _FromSource:
    """Stores the files directly from the reported directory."""

    request: UploadRequest
    directory: str
    destination: _Destination

    def store(self) -> dict[str, StoredFile]:
        with self.request.checkpoint.as_directory() as source:
            return self.destination.put(source, self.directory, give_away=self.request.delete_local, low_priority=False)


class _FromPrivateCopy:
    """Copies the files to a private directory when it is created, and stores them from there later."""

    def __init__(self, request: UploadRequest, directory: str, destination: _Destination) -> None:
        self._directory = directory
        self._destination = destination
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(request.checkpoint.as_directory())
            private = stack.enter_context(share_directory("uploads", secrets.token_hex(8)))
            copies = Storage(LocalFilesystem(), private, destination.storage.limits)
            put_directory(copies, source, _FILES, may_move=request.delete_local)
            if request.delete_local:
                shutil.rmtree(source, ignore_errors=True)
            self._source = os.path.join(private, _FILES)
            self._cleanup = stack.pop_all()

    def store(self) -> dict[str, StoredFile]:
        """Store the files, and delete the private copy."""
        with self._cleanup:
            return self._destination.put(self._source, self._directory, give_away=True, low_priority=True)


@dataclass(frozen=True, slots=True)
class _ByFunction:
    """Stores the files by calling the user's ``checkpoint_upload_fn``."""

    request: UploadRequest
    function: UploadFunction
    directory: str
    destination: _Destination

    def store(self) -> dict[str, StoredFile]:
        stored = self.function(self.request.checkpoint, self.directory)
        if not isinstance(stored, Checkpoint):
            raise CheckpointError(
                "[DT-805] checkpoint_upload_fn: expected a Checkpoint in the run directory as return value, got "
                f"{stored!r}"
            )
        files = _InPlace(stored, self.directory, self.destination).store()
        if self.request.delete_local and self.request.checkpoint.is_local and self.request.checkpoint != stored:
            shutil.rmtree(self.request.checkpoint.path, ignore_errors=True)
        return files


@dataclass(frozen=True, slots=True)
class _FromShared:
    """Stores the files of a shared directory, and releases the directory."""

    source: str
    directory: SharedDirectory
    cleanup: contextlib.ExitStack
    destination: _Destination
    low_priority: bool

    def store(self) -> dict[str, StoredFile]:
        with self.cleanup:
            name = self.directory.name
            files = self.destination.put(self.source, name, give_away=False, low_priority=self.low_priority)
            self.directory.delete_files()
        return files


class Uploads:
    """The uploads of one rank.

    Args:
        storage: the run directory.
        rank: the rank.
        config: contains the maximum number of background uploads, and whether to compute checksums.
        claim: see :class:`_Destination`.
    """

    def __init__(
        self, storage: Storage, rank: int, config: CheckpointConfig, claim: ClaimFunction | None = None
    ) -> None:
        self._storage = storage
        self._config = config
        self._destination = _Destination(storage, rank, config.checksums, claim)
        self._free = threading.BoundedSemaphore(config.max_uploads_in_flight)
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._used: set[str] = set()
        self._sharing: Sharing | None = None
        self._abandoned: list[str] = []

    @contextlib.contextmanager
    def share(self, directory: SharedDirectory) -> Iterator[Sharing]:
        """Make a shared directory the only checkpoint that can be reported during a ``with`` block.

        If it is not reported, its files are deleted by a later call, because other ranks may still be writing to it.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(directory.close)
            self.delete_abandoned()
            sharing = self._sharing = Sharing(directory, stack)
            try:
                yield sharing
            finally:
                self._sharing = None
                if not sharing.is_reported:
                    self._abandoned.append(directory.name)

    def shared_directory(self, checkpoint: Checkpoint) -> SharedDirectory | None:
        """Return the shared directory that a checkpoint refers to; None if it is not a shared checkpoint."""
        sharing = self._sharing
        return sharing.directory if sharing is not None and checkpoint == sharing.directory.checkpoint else None

    def require_no_sharing(self) -> None:
        """Check that no shared checkpoint waits to be reported.

        Raises:
            SessionError: a block of ``shared_checkpoint`` is active, and its checkpoint is not reported yet.
        """
        if self._sharing is not None and not self._sharing.is_reported:
            raise SessionError(
                "[DT-810] shared_checkpoint(): expected the next report to be that of the shared checkpoint, got "
                "another call. Call report(..., checkpoint=checkpoint) in the with block first"
            )

    def delete_abandoned(self) -> None:
        """Delete the files of shared checkpoints that were not reported. The start of an attempt deletes the rest."""
        abandoned, self._abandoned = self._abandoned, []
        for name in abandoned:
            with contextlib.suppress(StorageError):  # another rank may be deleting the same files
                self._storage.delete(name)

    def raise_failure(self) -> None:
        """Raise an error if a background upload has failed since the last call.

        Raises:
            StorageError: an upload failed; ``__cause__`` is the error of the first failed upload.
        """
        failures, self._failures = self._failures, []
        if failures:
            count = "a checkpoint was" if len(failures) == 1 else f"{len(failures)} checkpoints were"
            reasons = "; ".join(str(failure) or type(failure).__name__ for failure in failures)
            raise StorageError(
                f"[DT-407] {count} not stored because the background upload failed: {reasons}"
            ) from failures[0]

    def prepare(self, request: UploadRequest, number: int) -> Upload:
        """Store a checkpoint's files, or prepare to store them in the background.

        Args:
            request: the reported checkpoint.
            number: the report's number in the run.

        Raises:
            CheckpointError: the checkpoint has no files, or is not in the required directory.
            StorageError: the files could not be stored.
        """
        checkpoint = request.checkpoint
        if self._sharing is not None and self.shared_directory(checkpoint) is not None:
            return self._prepare_shared(request, number, self._sharing)
        self.require_no_sharing()
        if request.delete_local and self._is_of_run(checkpoint):
            request = replace(request, delete_local=False)  # the run may have to resume from this checkpoint
        if request.mode is CheckpointUploadMode.NO_UPLOAD and request.function is None:
            in_place = _InPlace(checkpoint, request.directory, self._destination)
            upload = Upload(in_place.directory, in_place.store(), None)
        else:
            if request.directory is not None:
                self._announce(request.directory)
            upload = self._prepare(request, request.directory or checkpoint_name(number))
        self._used.add(upload.directory)
        return upload._replace(ranks=request.ranks)

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

    def _prepare_shared(self, request: UploadRequest, number: int, sharing: Sharing) -> Upload:
        directory = sharing.directory
        if sharing.is_reported or directory.name != checkpoint_name(number):
            raise SessionError(
                "[DT-810] report(): expected one report of the shared checkpoint, got another report before it. Report "
                "the checkpoint once, first in the with block"
            )
        if other := request.options_for_own_checkpoint():
            raise SessionError(
                "[DT-810] report(): expected only checkpoint_upload_mode='sync' or 'async' as options for a shared "
                f"checkpoint, got {', '.join(other)}. Leave out {'this option' if len(other) == 1 else 'these options'}"
            )
        files: dict[str, StoredFile] | None = {}
        pending = None
        if (source := directory.take_files()) is not None:
            in_background = request.mode is CheckpointUploadMode.ASYNC
            method = _FromShared(source, directory, contextlib.ExitStack(), self._destination, in_background)
            if in_background:
                files, pending = None, replace(method, cleanup=sharing.cleanup.pop_all())
            else:
                files = method.store()
        sharing.is_reported = True
        self._used.add(directory.name)
        return Upload(directory.name, files, pending, ranks="together")

    def begin(self, upload: Upload, deliver: Callable[[dict[str, StoredFile]], None]) -> None:
        """Store the files of an upload in the background. Wait first if too many uploads are in flight.

        Args:
            upload: the upload, whose files are not stored yet.
            deliver: called with the stored files by relative path, on the thread of the upload.

        Raises:
            StorageError: the wait took longer than ``SyncConfig.sync_timeout``.
        """
        pending = upload.pending
        assert pending is not None
        if not self._free.acquire(timeout=self._storage.limits.deadline_s):
            raise StorageError(
                f"[DT-405] none of {self._config.max_uploads_in_flight} background uploads finished within "
                f"{self._storage.limits.deadline_s:g} s (SyncConfig.sync_timeout)"
            )

        def work() -> None:
            try:
                deliver(pending.store())
            except BaseException as error:  # raised again by the next report(), or at the end
                self._used.discard(upload.directory)
                self._failures.append(error)
            finally:
                self._free.release()

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, daemon=True, name=f"drivetrain upload {upload.directory}"))
        self._threads[-1].start()

    def drain(self) -> None:
        """Wait for the background uploads.

        Raises:
            StorageError: an upload failed, or took longer than ``SyncConfig.sync_timeout``.
        """
        for thread in self._threads:
            thread.join(self._storage.limits.deadline_s)
            if thread.is_alive():
                raise StorageError(
                    f"[DT-405] {thread.name} took longer than {self._storage.limits.deadline_s:g} s "
                    "(SyncConfig.sync_timeout)"
                )
        self.raise_failure()

    def _is_of_run(self, checkpoint: Checkpoint) -> bool:
        """Return True if a checkpoint is in the run directory and belongs to this run."""
        name = self._destination.name_of(checkpoint)
        return name is not None and (name in self._used or self._storage.exists(f"{name}/{LISTING_FILE}"))

    def _announce(self, directory: str) -> None:
        """Record a custom directory name, so that the directory is deleted if it is never committed."""
        if directory in self._used or self._storage.exists(f"{directory}/{LISTING_FILE}"):
            raise CheckpointError(
                f"[DT-411] report(checkpoint_dir_name=...): expected a new name, got {directory!r}, which another "
                "checkpoint of the run has"
            )
        self._storage.write_bytes(announcement_name(directory), b"", durable=False)
