"""Stores files that grow, such as ``result.json``, in a storage that can only replace files as a whole.

To upload such a file again whenever it has grown would cost bytes in proportion to the square of its size. Instead,
what was added since the last upload is uploaded as an object of its own, a segment, in the directory
``.segments/<file>``. The name of a segment, such as ``00002-00000017-000000000123456``, consists of the number of the
driver, a count, and the position in the file at which the segment begins.

The content of the file is that of the object with the name of the file, if there is one, followed by the segments in
the order of their names. A segment that begins before the end of what precedes it replaces everything after its
beginning. So a driver that resumes a run removes lines, and a segment that a suspended driver uploads late is ignored.

At the end of a run, a small file is uploaded as a whole, and its segments are deleted, the last one after the others. A
large file stays in segments, because to upload the whole file would double the bytes.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Protocol

from drivetrain._storage.filesystem import RemoteFilesystem
from drivetrain._storage.layout import LOGS, SEGMENTS, grows, run_file
from drivetrain._storage.reading import too_large
from drivetrain._storage.transfer import Job, Limits, run_jobs
from drivetrain.errors import StorageError

__all__ = ["Objects", "SegmentedFiles", "growing_files", "read_growing"]

_NAME = re.compile(r"(\d{5})-(\d{8})-(\d{15})")
_MAX_SEGMENT_BYTES = 32 << 20
_LARGE_BYTES = 8 << 20
_MAX_SMALL = 500
"""The maximum number of segments after the last large one. More are replaced by one, so that reading stays fast."""

_MERGED_BYTES = 1 << 20
"""The maximum size of a file that is uploaded as a whole at the end of a run."""

_HEAD_BYTES, _TAIL_BYTES = 1 << 16, 1 << 12
_READ_ATTEMPTS = 3


class Objects(Protocol):
    """A run directory that can only replace files as a whole: what this module uses of ``Storage``."""

    limits: Limits

    @property
    def remote(self) -> RemoteFilesystem:
        """The filesystem."""

    def path(self, *parts: str) -> str:
        """Return the path of a file on the filesystem."""

    def list_names(self, name: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the directories and of the files in a directory."""

    def walk(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file under a directory."""

    def read_object(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""

    def delete(self, name: str) -> None:
        """Delete a file or a directory tree, if it exists."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the content of a file.

    Attributes:
        path: the object that contains it, relative to the run directory.
        start: the position in the file at which it begins.
        size: the size of the object in bytes.
    """

    path: str
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def growing_files(storage: Objects) -> list[str]:
    """Return the sorted names of the files of a run directory that grow, in segments or not."""
    names = {*storage.list_names()[1], *(f"{LOGS}/{name}" for name in storage.list_names(LOGS)[1])}
    names |= {posixpath.dirname(path) for path in storage.walk(SEGMENTS)}
    return sorted(filter(grows, names))


def read_growing(storage: Objects, name: str) -> bytes | None:
    """Return the content of a file that grows, in a storage that is not local; None if there is no such file.

    Raises:
        StorageError: the file cannot be read, exceeds its size limit, or is damaged: a segment is missing.
    """
    return _read(storage, name)[0]


def _read(storage: Objects, name: str) -> tuple[bytes | None, list[_Part]]:
    """Return the content of a file, and the parts that it consists of."""
    for attempt in range(_READ_ATTEMPTS):
        segments = _find_segments(storage, name)
        whole = None if segments and segments[0].start == 0 else storage.read_object(name)
        if whole is not None:
            segments.insert(0, _Part(name, 0, len(whole)))
        parts = _visible(segments)
        if not parts:
            return None, []
        jobs = [Job(part.path, partial(_read_part, storage, part, whole)) for part in parts]
        contents = run_jobs(jobs, what=f"cannot read {name}:", limits=storage.limits)
        if all(data is not None and len(data) == part.size for data, part in zip(contents, parts, strict=True)):
            return _join(storage, name, parts, [data or b"" for data in contents]), parts
        if attempt == _READ_ATTEMPTS - 1:  # otherwise, the driver has replaced the segments meanwhile
            break
    raise StorageError(f"[DT-413] {storage.path(name)}: its segments in {SEGMENTS} changed while they were read")


def _find_segments(storage: Objects, name: str) -> list[_Part]:
    """Return the segments of a file in their order, including those that later ones replace."""
    directory = f"{SEGMENTS}/{name}"
    found = sorted((path, size) for path, size in storage.walk(directory).items() if _NAME.fullmatch(path))
    limit = run_file(name).limit
    if (total := sum(size for _, size in found)) > 2 * limit:
        raise too_large(storage.path(directory), total, limit)
    return [_Part(f"{directory}/{path}", int(path.rpartition("-")[2]), size) for path, size in found]


def _visible(parts: Sequence[_Part]) -> list[_Part]:
    """Return the parts without those that later parts replace."""
    visible: list[_Part] = []
    for part in parts:
        while visible and visible[-1].start >= part.start:
            visible.pop()
        visible.append(part)
    return visible


def _read_part(storage: Objects, part: _Part, whole: bytes | None) -> bytes | None:
    return whole if part.start == 0 and whole is not None else storage.read_object(part.path)


def _join(storage: Objects, name: str, parts: Sequence[_Part], contents: Sequence[bytes]) -> bytes:
    joined = bytearray()
    for part, data in zip(parts, contents, strict=True):
        if part.start > len(joined):  # the driver was killed while it deleted the segments of a merged file
            whole = storage.read_object(name) or b""
            joined += whole[len(joined) : part.start]
        if part.start > len(joined):
            raise StorageError(
                f"[DT-413] {storage.path(name)}: expected a segment in {SEGMENTS} that begins at byte {len(joined)}, "
                f"got the next one at byte {part.start}"
            )
        del joined[part.start :]
        joined += data
    if len(joined) > run_file(name).limit:
        raise too_large(storage.path(name), len(joined), run_file(name).limit)
    return bytes(joined)


class SegmentedFiles:
    """The files of a local directory that grow, and that are uploaded to a run directory.

    Args:
        storage: the run directory.
        directory: the local directory.
        driver: the number of the driver, which is greater than that of every earlier driver of the run.
    """

    def __init__(self, storage: Objects, directory: str, driver: int) -> None:
        self._storage = storage
        self._directory = directory
        self._driver = driver
        self._files: dict[str, _SegmentedFile] = {}

    def pull(self) -> None:
        """Download the files, so that this driver continues them."""
        for name in growing_files(self._storage):
            self._file(name).pull()

    def uploads(self, names: Sequence[str]) -> list[Job[None]]:
        """Return a job for each file that has changed. It uploads what was added, and may be repeated after an error.

        Args:
            names: the files that grow, among others.
        """
        files = {name: self._file(name) for name in names if grows(name)}
        return [Job(name, file.push) for name, file in files.items() if not file.is_current]

    def merges(self) -> list[Job[None]]:
        """Return a job for each small file in segments. It replaces the segments by the whole file."""
        return [Job(name, file.merge) for name, file in self._files.items() if file.is_small]

    def delete_empty_directory(self) -> None:
        """Delete the directory of the segments if it contains none."""
        if self._files and not self._storage.walk(SEGMENTS):
            self._storage.delete(SEGMENTS)

    def _file(self, name: str) -> _SegmentedFile:
        if name not in self._files:
            path = os.path.join(self._directory, name)
            self._files[name] = _SegmentedFile(self._storage, name, path, self._driver)
        return self._files[name]


class _SegmentedFile:
    """Uploads a local file that grows.

    Args:
        storage: the run directory.
        name: the name of the file in the run directory.
        path: the path of the local file.
        driver: the number of the driver, which is greater than that of every earlier driver of the run.
    """

    def __init__(self, storage: Objects, name: str, path: str, driver: int) -> None:
        self._storage = storage
        self._name = name
        self._path = path
        self._driver = driver
        self._count = 0
        self._stored: list[tuple[_Part, bytes]] = []  # the parts, each with a digest of the file up to its end
        self._pushed: tuple[int, int] | None = None  # the size and time of the local file that is stored

    @property
    def _stored_bytes(self) -> int:
        return self._stored[-1][0].end if self._stored else 0

    @property
    def is_small(self) -> bool:
        """True if the file is in segments, and so small that it can be uploaded again."""
        return self._stored_bytes <= _MERGED_BYTES and any(part.path != self._name for part, _ in self._stored)

    @property
    def is_current(self) -> bool:
        """True if the file probably has not changed since it was stored."""
        status = os.stat(self._path)
        return self._pushed == (status.st_size, status.st_mtime_ns)

    def pull(self) -> None:
        """Download the content of earlier drivers."""
        data, parts = _read(self._storage, self._name)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with open(self._path, "w+b") as file:
            file.write(data or b"")
            file.flush()
            self._stored = [(part, _digest(file, part.end)) for part in parts]

    def push(self) -> None:
        """Upload what was added to the file, or what follows its first change. It may be called again after an error.

        Raises:
            OSError: the file cannot be read, or the storage does not respond.
        """
        with open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            kept = len(self._stored)
            while kept and not self._is_unchanged(file, kept - 1, status.st_size):
                kept -= 1
            if kept < len(self._stored) or status.st_size > self._stored_bytes or not self._stored:
                kept = self._without_small(kept)
                replaced = [part for part, _ in self._stored[kept:]]
                del self._stored[kept:]
                self._append(file, status.st_size)
                for part in replaced:  # from now on, they have no effect
                    self._storage.remote.delete(self._storage.path(part.path))
        self._pushed = (status.st_size, status.st_mtime_ns)

    def merge(self) -> None:
        """Upload the file as a whole, in place of its segments."""
        with open(self._path, "rb") as file:
            self._storage.remote.write_bytes(self._storage.path(self._name), file.read())
        *others, last = [self._storage.path(part.path) for part, _ in self._stored if part.path != self._name]
        deletions = [Job(path, partial(self._storage.remote.delete, path)) for path in others]
        run_jobs(deletions, what=f"deletion of the segments of {self._name}", limits=self._storage.limits)
        self._storage.remote.delete(last)
        self._storage.delete(f"{SEGMENTS}/{self._name}")  # the empty directory, if there are directories

    def _append(self, file: BinaryIO, size: int) -> None:
        start = self._stored_bytes
        while True:
            file.seek(start)
            data = file.read(min(size - start, _MAX_SEGMENT_BYTES))
            self._count += 1
            path = f"{SEGMENTS}/{self._name}/{self._driver:05}-{self._count:08}-{start:015}"
            self._storage.remote.write_bytes(self._storage.path(path), data)
            part = _Part(path, start, len(data))
            self._stored.append((part, _digest(file, part.end)))
            start = part.end
            if start >= size or not data:
                return

    def _is_unchanged(self, file: BinaryIO, number: int, size: int) -> bool:
        """Return True if the file still begins with the stored bytes up to the end of a part."""
        part, digest = self._stored[number]
        return part.end <= size and _digest(file, part.end) == digest

    def _without_small(self, kept: int) -> int:
        """Return how many of the first parts to keep, so that not too many small segments are left."""
        first = kept
        while first and self._stored[first - 1][0].size < _LARGE_BYTES:
            first -= 1
        return first if kept - first > _MAX_SMALL else kept


def _digest(file: BinaryIO, end: int) -> bytes:
    """Return a digest of the first and the last bytes of a file up to a position.

    The loggers change a file only at its end, or replace it by one with another header.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(os.pread(file.fileno(), min(end, _HEAD_BYTES), 0))
    digest.update(os.pread(file.fileno(), min(end, _TAIL_BYTES), max(0, end - _TAIL_BYTES)))
    return digest.digest()
