"""Stores files that grow, such as ``result.json``, in a storage that can only replace files as a whole.

To upload such a file again whenever it has grown would cost bytes in proportion to the square of its size. Instead,
what was added since the last upload is uploaded as an object of its own, a segment, in the directory
``.segments/<file>``. The name of a segment, such as ``00002-00000017-000000000123456``, consists of the number of the
driver, a count, and the position in the file at which the segment begins.

The content of the file is that of the object with the name of the file, if there is one, followed by the segments in
the order of their names. A segment that begins before the end of what precedes it hides everything after its beginning.
So a driver that resumes a run removes lines, by one upload that takes effect as a whole. Hidden segments are deleted
afterwards.

At the end of a run, a small file is uploaded as a whole, and its segments are deleted, the last one after the others. A
large file stays in segments, because to upload the whole file would double the bytes.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO, Protocol

from drivetrain._storage.filesystem import RemoteFilesystem
from drivetrain._storage.layout import LOGS, SEGMENTS, grows, run_file
from drivetrain._storage.reading import too_large
from drivetrain._storage.transfer import Job, Limits, run_jobs
from drivetrain.errors import StorageError

__all__ = ["Objects", "SegmentedFiles", "growing_files", "open_growing", "read_growing"]

_NAME = re.compile(r"(\d{5})-\d{8}-(\d{15})")
_MAX_SEGMENT_BYTES = 32 << 20

_MANY = 500
"""The number of segments of a file from which on it is no longer uploaded before each commit."""

_MANY_BYTES = 8 << 20
"""The number of new bytes for which a file with many segments is nevertheless uploaded before a commit."""

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


@dataclass(frozen=True, slots=True)
class _Listing:
    """The objects of a file.

    Attributes:
        visible: the parts that the content consists of, in their order. Each may hide the end of the one before.
        hidden: the paths of the segments that later ones hide as a whole.
        whole: the content of the object with the name of the file, if it is the first visible part; otherwise None.
    """

    visible: list[_Part]
    hidden: list[str]
    whole: bytes | None

    @classmethod
    def of(cls, storage: Objects, name: str) -> _Listing:
        directory = f"{SEGMENTS}/{name}"
        found = sorted((path, size) for path, size in storage.walk(directory).items() if _NAME.fullmatch(path))
        parts = [_Part(f"{directory}/{path}", int(path.rpartition("-")[2]), size) for path, size in found]
        whole = None if parts and parts[0].start == 0 else storage.read_object(name)
        if whole is not None:
            parts.insert(0, _Part(name, 0, len(whole)))
        visible: list[_Part] = []
        for part in parts:
            while visible and visible[-1].start >= part.start:
                visible.pop()
            visible.append(part)
        paths = {part.path for part in visible}
        hidden = [part.path for part in parts if part.path not in {*paths, name}]
        return cls(visible, hidden, whole if name in paths else None)

    @property
    def end(self) -> int:
        return self.visible[-1].end if self.visible else 0

    @property
    def has_gaps(self) -> bool:
        """True if a part of the content is in none of the visible objects."""
        return any(part.end < following.start for part, following in pairwise(self.visible))

    def read(self, storage: Objects, part: _Part) -> bytes | None:
        """Return the content of a visible part; None if it was deleted meanwhile."""
        if self.whole is not None and part is self.visible[0]:
            return self.whole
        return storage.read_object(part.path)


def growing_files(storage: Objects) -> list[str]:
    """Return the sorted names of the files of a run directory that grow, in segments or not."""
    names = {*storage.list_names()[1], *storage.list_names(SEGMENTS)[0]}
    logs = {*storage.list_names(LOGS)[1], *storage.list_names(f"{SEGMENTS}/{LOGS}")[0]}
    return sorted(filter(grows, names | {f"{LOGS}/{name}" for name in logs}))


def read_growing(storage: Objects, name: str) -> bytes | None:
    """Return the content of a file that grows, in a storage that is not local; None if there is no such file.

    Raises:
        StorageError: the file cannot be read, exceeds its size limit, or is damaged: a segment is missing.
    """
    listing, content = _read(storage, name)
    if listing.visible and len(content) < listing.end:
        raise StorageError(
            f"[DT-413] {storage.path(name)}: expected a segment in {SEGMENTS} that begins at byte {len(content)}, got "
            "only later ones"
        )
    return content if listing.visible else None


def open_growing(storage: Objects, name: str) -> BinaryIO:
    """Open a file that grows, in a storage that is not local. Segments are downloaded when they are read.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the file cannot be read, or is damaged: a segment is missing.
    """
    listing = _Listing.of(storage, name)
    if not listing.visible:
        raise FileNotFoundError(storage.path(name))
    if listing.has_gaps:
        return io.BytesIO(read_growing(storage, name) or b"")
    return io.BufferedReader(_SegmentReader(storage, name, listing))


class _SegmentReader(io.RawIOBase):
    """Reads a file in segments as it was when it was listed.

    Args:
        storage: the run directory.
        name: the file.
        listing: its objects, without gaps.
    """

    def __init__(self, storage: Objects, name: str, listing: _Listing) -> None:
        super().__init__()
        self._storage = storage
        self._name = name
        self._listing = listing
        self._starts = [part.start for part in listing.visible]
        self._ends = [*self._starts[1:], listing.end]  # the next part hides the end of a part
        self._contents: dict[int, bytes] = {}
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._listing.end}[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._listing.end:
            return 0
        number = bisect_right(self._starts, self._position) - 1
        first = self._position - self._starts[number]
        end = min(self._ends[number] - self._starts[number], first + len(buffer))
        data = self._content(number)[first:end]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _content(self, number: int) -> bytes:
        if number not in self._contents:
            part = self._listing.visible[number]
            data = self._listing.read(self._storage, part)
            if data is None:  # the run has ended meanwhile, and its segments were merged
                data = (read_growing(self._storage, self._name) or b"")[part.start : part.end]
            if len(data) != part.size:
                raise StorageError(
                    f"[DT-413] {self._storage.path(part.path)}: expected {part.size:,} bytes, as listed, got "
                    f"{len(data):,}"
                )
            self._contents[number] = data
        return self._contents[number]


def _read(storage: Objects, name: str) -> tuple[_Listing, bytes]:
    """Return the objects of a file, and its content up to the first missing segment."""
    for _ in range(_READ_ATTEMPTS):
        listing = _Listing.of(storage, name)
        if listing.end > run_file(name).limit:
            raise too_large(storage.path(name), listing.end, run_file(name).limit)
        jobs = [Job(part.path, partial(listing.read, storage, part)) for part in listing.visible]
        contents = run_jobs(jobs, what=f"cannot read {name}:", limits=storage.limits)
        if all(data is not None for data in contents):
            return listing, _join(storage, name, listing, [data or b"" for data in contents])
    raise StorageError(f"[DT-413] {storage.path(name)}: its segments in {SEGMENTS} changed while they were read")


def _join(storage: Objects, name: str, listing: _Listing, contents: Sequence[bytes]) -> bytes:
    joined = bytearray()
    whole: bytes | None = None
    for part, data in zip(listing.visible, contents, strict=True):
        if part.start > len(joined):  # the driver was killed while it deleted the segments of a merged file
            whole = storage.read_object(name) or b"" if whole is None else whole
            joined += whole[len(joined) : part.start]
        if part.start > len(joined):
            break
        del joined[part.start :]
        joined += data
    return bytes(joined)


class SegmentedFiles:
    """The files of a local directory that grow, and that are uploaded to a run directory.

    Args:
        storage: the run directory.
        directory: the local directory.
        driver: the number of the driver, which is greater than that of every earlier driver of the run.
        guard: called before each change of the storage. If it raises a StorageError, nothing is changed.
        warn: called with a message about a damaged file.
    """

    def __init__(
        self,
        storage: Objects,
        directory: str,
        driver: int,
        guard: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._changes = _Changes(storage, driver, guard)
        self._warn = warn
        self._files: dict[str, _SegmentedFile] = {}
        self._lock = threading.Lock()

    def pull(self) -> None:
        """Download the files, so that this driver continues them. Logs are continued without a download.

        A damaged file does not prevent a run from being resumed: it is continued from where it can be read.

        Raises:
            StorageError: the storage cannot be read.
        """
        with self._lock:
            files = {name: self._file(name) for name in growing_files(self._storage)}
            jobs = [Job(name, partial(self._pull, name, file)) for name, file in files.items()]
            run_jobs(jobs, what=f"download from {self._storage.path()}", limits=self._storage.limits)

    def _pull(self, name: str, file: _SegmentedFile) -> None:
        if name.startswith(f"{LOGS}/"):
            file.adopt()
        elif (lost := file.pull()) > 0:
            self._warn(f"{name}: a segment is missing in {SEGMENTS}, so its last {lost:,} bytes are lost")

    def push(self, names: Collection[str], *, before_commit: bool = False) -> None:
        """Upload what was added to files, or what follows their first change.

        Args:
            names: the files of the directory; those that do not grow are ignored.
            before_commit: omit files with many segments and few new bytes, so that their segments do not become too
                many. The next upload that is not before a commit contains them.

        Raises:
            StorageError: a file could not be uploaded.
        """
        with self._lock:
            files = {name: self._file(name) for name in names if grows(name)}
            jobs = [Job(name, file.push) for name, file in files.items() if file.is_due(before_commit)]
            run_jobs(jobs, what=f"upload to {self._storage.path()}", limits=self._storage.limits)

    def merge(self) -> None:
        """Replace the segments of small files by the whole files.

        Raises:
            StorageError: a file could not be replaced. It stays in segments.
        """
        with self._lock:
            jobs = [Job(name, file.merge) for name, file in self._files.items() if file.is_small]
            run_jobs(jobs, what=f"merge of segments in {self._storage.path()}", limits=self._storage.limits)

    def _file(self, name: str) -> _SegmentedFile:
        if name not in self._files:
            path = os.path.join(self._directory, name)
            self._files[name] = _SegmentedFile(self._changes, name, path)
        return self._files[name]


class _Changes:
    """Writes and deletes objects for one driver.

    Args:
        storage: the run directory.
        driver: the number of the driver.
        guard: called before each change.
    """

    def __init__(self, storage: Objects, driver: int, guard: Callable[[], None]) -> None:
        self.storage = storage
        self.driver = driver
        self._guard = guard

    def write(self, path: str, data: bytes) -> None:
        self._guard()
        self.storage.remote.write_bytes(self.storage.path(path), data, guard=self._guard)

    def delete(self, path: str) -> None:
        self._guard()
        self.storage.remote.delete(self.storage.path(path))


class _SegmentedFile:
    """Uploads a local file that grows. Each method may be called again after an error.

    Args:
        changes: changes the run directory.
        name: the name of the file in the run directory.
        path: the path of the local file.
    """

    def __init__(self, changes: _Changes, name: str, path: str) -> None:
        self._changes = changes
        self._storage = changes.storage
        self._name = name
        self._path = path
        self._offset = 0  # the position in the stored file at which the local file begins
        self._count = 0
        self._stored: list[tuple[_Part, bytes]] = []  # each with a digest of the local file up to its end
        self._obsolete: list[str] = []  # objects that have no effect, and have not been deleted
        self._pushed: tuple[int, int] | None = None  # the size and time of the local file when it was uploaded

    @property
    def _end(self) -> int:
        return self._stored[-1][0].end if self._stored else self._offset

    @property
    def is_small(self) -> bool:
        """True if the file is in segments, and so small that it can be uploaded again."""
        is_in_segments = any(part.path != self._name for part, _ in self._stored)
        return is_in_segments and not self._offset and self._end <= _MERGED_BYTES

    def is_due(self, before_commit: bool) -> bool:
        """Return True if the file has changed, and has few segments or many new bytes."""
        status = os.stat(self._path)
        if self._pushed == (status.st_size, status.st_mtime_ns):
            return False
        new_bytes = self._offset + status.st_size - self._end
        return not before_commit or len(self._stored) < _MANY or new_bytes >= _MANY_BYTES

    def pull(self) -> int:
        """Download the content of earlier drivers. Return the number of bytes after the first missing segment."""
        listing, content = _read(self._storage, self._name)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with open(self._path, "w+b") as file:
            file.write(content)
            file.flush()
            intact = [part for part in listing.visible if part.end <= len(content)]
            self._stored = [(part, _digest(file, part.end)) for part in intact]
        self._obsolete = listing.hidden
        return listing.end - len(content)

    def adopt(self) -> None:
        """Continue the content of earlier drivers without downloading it. The local file contains only what follows."""
        listing = _Listing.of(self._storage, self._name)
        self._offset = listing.end
        self._obsolete = listing.hidden

    def push(self) -> None:
        """Upload what was added to the file, or what follows its first change."""
        with open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            size = self._offset + status.st_size
            kept = len(self._stored)
            while kept and not self._is_unchanged(file, kept - 1, size):
                kept -= 1
            if kept and not self._stored[kept - 1][0].size and size > self._end:
                kept -= 1  # an empty segment, which has removed lines
            if kept < len(self._stored):
                self._replace(file, kept, size)
            while self._end < size or not self._stored:
                self._stored.append(self._upload(file, self._end, min(size, self._end + _MAX_SEGMENT_BYTES)))
        while self._obsolete:
            self._changes.delete(self._obsolete[-1])
            self._obsolete.pop()
        self._pushed = (status.st_size, status.st_mtime_ns)

    def merge(self) -> None:
        """Upload the file as a whole, in place of its segments. If another driver has added some, they are kept."""
        listing = _Listing.of(self._storage, self._name)
        *others, last = [part.path for part, _ in self._stored if part.path != self._name]
        if [part.path for part in listing.visible if part.path != self._name] != [*others, last]:
            return
        with open(self._path, "rb") as file:
            self._changes.write(self._name, file.read(self._end))
        for paths in (listing.hidden, others, [last]):
            jobs = [Job(path, partial(self._changes.delete, path)) for path in paths]
            run_jobs(jobs, what=f"deletion of the segments of {self._name}", limits=self._storage.limits)

    def _replace(self, file: BinaryIO, kept: int, size: int) -> None:
        """Replace all but the first parts by a single one, which takes effect as a whole."""
        start = self._stored[kept - 1][0].end if kept else self._offset
        new = self._upload(file, start, size)
        self._obsolete += [part.path for part, _ in self._stored[kept:]]
        self._stored[kept:] = [new]

    def _upload(self, file: BinaryIO, start: int, end: int) -> tuple[_Part, bytes]:
        """Upload a range of the file as a segment. Return it with its digest, which is computed before the upload."""
        file.seek(start - self._offset)
        data = file.read(end - start)
        self._count += 1
        path = f"{SEGMENTS}/{self._name}/{self._changes.driver:05}-{self._count:08}-{start:015}"
        part = _Part(path, start, len(data))
        digest = _digest(file, part.end - self._offset)
        try:
            self._changes.write(path, data)
        except BaseException:
            self._obsolete.append(path)  # an upload that has failed may nevertheless have taken effect
            raise
        return part, digest

    def _is_unchanged(self, file: BinaryIO, number: int, size: int) -> bool:
        """Return True if the file still begins with the stored bytes up to the end of a part."""
        part, digest = self._stored[number]
        return part.end <= size and _digest(file, part.end - self._offset) == digest


def _digest(file: BinaryIO, end: int) -> bytes:
    """Return a digest of the first and the last bytes of a file up to a position.

    The loggers change a file only at its end, or replace it by one with another header.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(os.pread(file.fileno(), min(end, _HEAD_BYTES), 0))
    digest.update(os.pread(file.fileno(), min(end, _TAIL_BYTES), max(0, end - _TAIL_BYTES)))
    return digest.digest()
