"""Stores the files of a local directory in a storage, where several ranks may store files at the same time.

There are three ways: remote storage gets an upload of each file. On a local filesystem, a whole directory is moved if
the caller gives it away and no other rank has stored files, and otherwise each file is copied.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from drivetrain._base.crashpoints import reach
from drivetrain._storage.checksums import checksum
from drivetrain._storage.directory import Storage
from drivetrain._storage.duplicates import duplicates_of
from drivetrain._storage.filesystem import (
    CHUNK_BYTES,
    StoredFile,
    copy_file,
    copy_range,
    data_ranges,
    make_below,
    walk_entries,
    walk_local,
)
from drivetrain._storage.transfer import Job, Limits, explain, run_jobs
from drivetrain.errors import CheckpointError, StorageError

__all__ = ["put_directory"]

_BATCH_FILES = 64
_FAST_FILE_S = 0.0005
"""Seconds for a small file. Below it, several threads would only wait for each other to start the next system call."""


def put_directory(
    storage: Storage, source: str, name: str, *, rank: int = 0, may_move: bool = False, checksums: bool = False,
    low_priority: bool = False, claim: Callable[[str, Collection[str]], Collection[str]] | None = None,
) -> dict[str, StoredFile]:  # fmt: skip
    """Store the files of a local directory in the directory ``name``, where other ranks may store files too.

    A file that another rank stores too goes to ``.rank_<rank>/`` instead, and the commit resolves such duplicates
    (:mod:`drivetrain._storage.duplicates`). A local filesystem refuses to create a file twice. On remote storage,
    where the last upload of a file would win, ``claim`` asks the driver.

    A link to a file is stored as a copy of that file. Other links and special files are skipped with a warning.

    Args:
        storage: the storage.
        source: the local directory.
        name: the directory in the storage, which is created if it is missing.
        rank: the rank that the files belong to.
        may_move: True if the files may be moved instead of copied.
        checksums: compute checksums on a local filesystem too.
        low_priority: lower the priority of the threads, in favor of the threads that train.
        claim: called with ``name`` and the files before an upload to remote storage; returns the files that another
            rank stores too. None if no other rank does.

    Returns:
        The size of each file and its checksum if computed, by its path relative to ``source`` with forward slashes.

    Raises:
        CheckpointError: ``source`` is not a directory, or has no files.
        StorageError: a file could not be stored.
    """
    if not os.path.isdir(source):
        raise CheckpointError(
            f"[DT-408] {source}: expected the checkpoint's directory, which does not exist. Write the files "
            "before calling report()"
        )
    found = dict(walk_local(source))
    if not found:
        raise CheckpointError(
            f"[DT-408] {source}: expected the checkpoint's directory with at least one file, got an empty "
            "directory. Write the files before calling report()"
        )
    if skipped := [relative for relative, _ in walk_entries(source) if relative not in found]:
        warnings.warn(
            f"[DT-416] {source}: expected files and links to files, got other links or special files, which are "
            f"not stored: {', '.join(map(repr, skipped[:10]))}. Copy what they refer to into the directory",
            stacklevel=2,
        )
    limits = replace(storage.limits, low_priority=True) if low_priority else storage.limits
    storage.require_no_link(name)
    reach("before upload")
    try:
        if not storage.is_local:
            apart = claim(name, found) if claim is not None else ()
            stored = _upload(storage, source, name, found, limits, {path: duplicates_of(rank) for path in apart})
        elif may_move and _take_over(storage, source, name):
            stored = _describe(storage.path(name), found, checksums)
        else:
            stored = _copy(storage, source, name, found, rank, checksums, limits)
    except (OSError, StorageError) as error:
        if missing := [relative for relative in found if not os.path.lexists(os.path.join(source, relative))]:
            raise CheckpointError(
                f"[DT-425] {source}: expected the directory not to change during report(), but {missing[0]!r} was "
                "deleted. Save each checkpoint to a directory of its own, and delete it after report() has returned"
            ) from error
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"[DT-406] cannot store the checkpoint {source} in {storage.path(name)}: {explain(error)}"
        ) from error
    reach("after upload")
    return stored


def _upload(
    storage: Storage,
    source: str,
    name: str,
    found: Mapping[str, os.stat_result],
    limits: Limits,
    apart: Mapping[str, str],
) -> dict[str, StoredFile]:
    """Upload files, those in ``apart`` to the directory that it maps them to."""
    order = sorted(found, key=lambda relative: -found[relative].st_size)
    targets = {relative: posixpath.join(apart.get(relative, ""), relative) for relative in order}
    jobs = [
        Job(relative, partial(storage.remote.put_file, os.path.join(source, relative), storage.path(name, target)))
        for relative, target in targets.items()
    ]
    what = f"upload of {storage.path(name)}"
    stored = dict(zip(order, run_jobs(jobs, what=what, limits=limits), strict=True))
    if (damage := storage.find_damage(name, {targets[path]: facts for path, facts in stored.items()})) is not None:
        raise StorageError(f"{what} is not complete: {damage}")
    return stored


def _take_over(storage: Storage, source: str, name: str) -> bool:
    """Move a whole directory instead of copying it. Return False if it contains links or cannot be moved."""
    if _has_links(source):
        return False
    target = storage.path(name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.rename(source, target)
    except OSError:  # another filesystem, or another rank has already stored files
        return False
    with contextlib.suppress(OSError):  # a temporary directory has the mode 0700
        os.chmod(target, stat.S_IMODE(os.stat(storage.root).st_mode))
    return True


def _copy(
    storage: Storage,
    source: str,
    name: str,
    found: Mapping[str, os.stat_result],
    rank: int,
    checksums: bool,
    limits: Limits,
) -> dict[str, StoredFile]:
    claims = _Claims(storage.path(name), rank)
    try:
        _copy_claimed(source, found, claims, limits)
    except BaseException:
        claims.withdraw()
        raise
    return _describe(source, found, checksums)


def _copy_claimed(source: str, found: Mapping[str, os.stat_result], claims: _Claims, limits: Limits) -> None:
    target = claims.target
    made: set[str] = set()
    parts: list[Job[None]] = []
    batches: list[Job[None]] = []
    batch: list[tuple[str, str, int]] = []
    for relative, status in found.items():
        source_path = os.path.join(source, relative)
        if (parent := posixpath.dirname(relative)) not in made:
            make_below(target, parent)
            made.add(parent)
        if status.st_size <= CHUNK_BYTES:
            batch.append((source_path, relative, status.st_mode))
            if len(batch) == _BATCH_FILES:
                batches.append(Job(relative, partial(_copy_files, batch, claims)))
                batch = []
            continue
        descriptor = claims.claim(relative, status.st_mode)
        try:
            os.truncate(descriptor, status.st_size)
            destination = os.readlink(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        with open(source_path, "rb", buffering=0) as file:
            for start, count in data_ranges(file.fileno(), status.st_size, status.st_blocks * 512):
                parts.append(Job(relative, partial(_copy_part, source_path, destination, start, count)))
    if batch:
        batches.append(Job(batch[0][1], partial(_copy_files, batch, claims)))
    what = f"copy of {source} to {target}"
    jobs = [*parts, *batches]
    if len(jobs) == 1:
        run_jobs(jobs, what=what, limits=limits, in_thread=False)
        return
    threads = min(limits.threads, os.cpu_count() or 1)
    if not parts:
        began = time.monotonic()
        run_jobs([jobs.pop(0)], what=what, limits=limits)
        taken_s = time.monotonic() - began
        limits = replace(limits, deadline_s=limits.deadline_s - taken_s)
        if taken_s < _BATCH_FILES * _FAST_FILE_S:
            threads = 1
    run_jobs(jobs, what=what, limits=replace(limits, threads=threads))


def _describe(directory: str, found: Mapping[str, os.stat_result], checksums: bool) -> dict[str, StoredFile]:
    return {
        relative: StoredFile(status.st_size, checksum(os.path.join(directory, relative)) if checksums else None)
        for relative, status in found.items()
    }


def _has_links(directory: str) -> bool:
    """Return True if a directory is a link or contains one, because moving it would not move the link's target."""
    return os.path.islink(directory) or any(entry.is_symlink() for _, entry in walk_entries(directory))


class _Claims:
    """The files that one copy operation of a rank creates in a directory to which several ranks copy files.

    If the copy operation fails, these files are deleted. Otherwise a retry would mistake them for the files of another
    rank.
    """

    def __init__(self, target: str, rank: int) -> None:
        self.target = target
        self._rank = rank
        self._lock = threading.Lock()
        self._withdrawn = False
        self._paths: list[str] = []

    def claim(self, relative: str, mode: int) -> int:
        """Create and open a file, in the directory of this rank's duplicates if another rank has created it already."""
        mode = stat.S_IMODE(mode) | stat.S_IWUSR
        path = os.path.join(self.target, relative)
        with self._lock:
            if self._withdrawn:
                raise StorageError("cancelled, because another part failed")
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            except FileExistsError:
                path = os.path.join(self.target, duplicates_of(self._rank), relative)
                make_below(self.target, os.path.join(duplicates_of(self._rank), os.path.dirname(relative)))
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
            self._paths.append(path)
        return descriptor

    def withdraw(self) -> None:
        """Delete the created files, and make all further calls of :meth:`claim` fail."""
        with self._lock:
            self._withdrawn = True
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _copy_files(batch: Sequence[tuple[str, str, int]], claims: _Claims) -> None:
    for source_path, relative, mode in batch:
        source = os.open(source_path, os.O_RDONLY)
        try:
            copy = claims.claim(relative, mode)
            try:
                copy_file(source, copy, os.fstat(source).st_size)
            finally:
                os.close(copy)
        finally:
            os.close(source)


def _copy_part(source_path: str, destination: str, start: int, count: int) -> None:
    source = os.open(source_path, os.O_RDONLY)
    try:
        copy = os.open(destination, os.O_WRONLY)
        try:
            copy_range(source, copy, start, count)
        finally:
            os.close(copy)
    finally:
        os.close(source)
