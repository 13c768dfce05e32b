"""What the storage asks of a filesystem, and the local one, which needs nothing but the standard library.

**How a write is atomic.** On a local filesystem the bytes go to a temporary file beside the target, which is flushed to
the disk, renamed over the target, and made durable by flushing the directory. A reader, or a process started after a
crash at any instant, sees the old file or the new one, never a part. An object store shows an object when its put is
complete, and not before, so there the put is all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drivetrain._base.crashpoints import is_armed, reach
from drivetrain._storage.layout import draft_name
from drivetrain._storage.reading import read_regular
from drivetrain.errors import StorageError

__all__ = ["CHUNK_BYTES", "Filesystem", "LocalFilesystem", "StoredFile", "flush_to_disk", "walk_entries", "walk_local"]

CHUNK_BYTES = 32 << 20
"""Bytes that one thread moves of a big file before it looks for the next piece of work."""

_SMALL_BYTES = 1 << 16  # less is copied faster through memory
_CANNOT_COPY_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class StoredFile(NamedTuple):
    """A file as the list of a checkpoint's files knows it: its size in bytes, and a CRC-32 if one was taken."""

    size: int
    crc32: int | None = None


class Filesystem(Protocol):
    """A tree of files. Paths are strings with forward slashes; those of missing files raise FileNotFoundError."""

    is_local: bool

    @property
    def handle(self) -> Any:
        """What users know it as: a filesystem of fsspec or of pyarrow."""
        ...

    def read_bytes(self, path: str, limit: int) -> bytes:
        """The content of a file; a StorageError if it has more bytes than the limit."""
        ...

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        durable: bool = True,
        midway: Callable[[], None] | None = None,
        mode: int = 0o666,
    ) -> None:
        """Replaces a file atomically.

        Args:
            path: the file.
            data: its new content.
            durable: flush it to the disk.
            midway: called when everything is written, before the new content is visible.
            mode: the permissions of the file before the umask is applied, on a filesystem that has permissions.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory."""
        ...

    def list_names(self, path: str) -> tuple[list[str], list[str]]:
        """The names of the directories and of the files in a directory, each sorted; none where it is missing."""
        ...

    def walk(self, path: str) -> dict[str, int]:
        """The size in bytes of each file at any depth, by relative path; none where the directory is missing."""
        ...

    def delete(self, path: str) -> None:
        """Deletes a file or a tree; nothing happens where there is none."""
        ...

    def make_directory(self, path: str) -> None:
        """Makes a directory, and those above it, where the filesystem has such things."""
        ...

    def put_file(self, source: str, path: str) -> StoredFile:
        """Stores a copy of a local file, and returns what was stored, as far as it was looked at."""
        ...

    def get_range(self, path: str, descriptor: int, start: int, count: int) -> None:
        """Writes a range of bytes of a file to the same place of a local one."""
        ...


class LocalFilesystem:
    """This machine's filesystem, whatever is mounted in it."""

    is_local = True

    def __repr__(self) -> str:
        return "LocalFilesystem()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalFilesystem)

    def __hash__(self) -> int:
        return hash(LocalFilesystem)

    @property
    def handle(self) -> Any:
        """Fsspec's local filesystem."""
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

    def read_bytes(self, path: str, limit: int) -> bytes:
        """The content of a regular file."""
        return read_regular(os.path.dirname(path), os.path.basename(path), limit)

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        durable: bool = True,
        midway: Callable[[], None] | None = None,
        mode: int = 0o666,
    ) -> None:
        """Replaces a file atomically; see the module's docstring."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = str(target.with_name(draft_name(target.name)))
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(descriptor)
            if midway is not None:
                midway()
            os.replace(draft, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
        if durable:
            flush_to_disk(str(target.parent))

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory."""
        return os.path.exists(path)

    def list_names(self, path: str) -> tuple[list[str], list[str]]:
        """The names of the directories and of the files in a directory; a link is a file."""
        directories: list[str] = []
        files: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                (directories if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        return sorted(directories), sorted(files)

    def walk(self, path: str) -> dict[str, int]:
        """The size of each file at any depth; links to files count as files."""
        return {relative: status.st_size for relative, status in walk_local(path)}

    def delete(self, path: str) -> None:
        """Deletes a file, a link or a tree."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def make_directory(self, path: str) -> None:
        """Makes a directory, and those above it."""
        os.makedirs(path, exist_ok=True)

    def put_file(self, source: str, path: str) -> StoredFile:
        """Copies a file as a whole."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with open(source, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                copy_range(file.fileno(), descriptor, 0, size)
        finally:
            os.close(descriptor)
        return StoredFile(size)

    def get_range(self, path: str, descriptor: int, start: int, count: int) -> None:
        """Copies a range of bytes."""
        with open(path, "rb", buffering=0) as file:
            copy_range(file.fileno(), descriptor, start, count)


def copy_range(source: int, target: int, start: int, count: int) -> None:
    """Copies a range of bytes between two open files, in the kernel, and without copying where it can share them.

    Raises:
        EOFError: the source ends before.
    """
    if is_armed() and count > 1:
        _copy(source, target, start, count // 2)
        reach("mid-file")
        start, count = start + count // 2, count - count // 2
    _copy(source, target, start, count)


def _copy(source: int, target: int, start: int, count: int) -> None:
    end = start + count
    in_kernel = count > _SMALL_BYTES
    while start < end:
        if in_kernel:
            try:
                done = os.copy_file_range(source, target, end - start, start, start)
            except OSError as error:
                if error.errno not in _CANNOT_COPY_IN_KERNEL:
                    raise
                in_kernel = False
                continue
        else:
            data = os.pread(source, min(end - start, 1 << 20), start)
            done = os.pwrite(target, data, start) if data else 0
        if done == 0:
            raise EOFError(f"a file became shorter while it was read: {end - start} bytes are missing")
        start += done


def data_ranges(descriptor: int, size: int, allocated: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data, as start and count, in pieces of at most :data:`CHUNK_BYTES`.

    Args:
        descriptor: the open file.
        size: its size in bytes.
        allocated: how many bytes of it the filesystem has stored; where those are fewer, it has holes.
    """
    position = 0
    while position < size:
        begin, end = position, size
        if allocated < size:
            try:
                begin = os.lseek(descriptor, position, os.SEEK_DATA)
                end = os.lseek(descriptor, begin, os.SEEK_HOLE)
            except OSError:  # no data up to the end
                return
        for start in range(begin, end, CHUNK_BYTES):
            yield start, min(CHUNK_BYTES, end - start)
        position = end


def find_link(root: str, relative: str) -> str | None:
    """The first component of a path below a directory that is a symbolic link; None without one."""
    path = root
    for part in filter(None, relative.split("/")):
        path = os.path.join(path, part)
        if os.path.islink(path):
            return path
    return None


def make_below(root: str, relative: str) -> None:
    """Makes a directory below another one, and those between them, without following links.

    Raises:
        StorageError: there is a symbolic link on the way.
    """
    if (link := find_link(root, relative)) is not None:
        raise link_error(link)
    os.makedirs(os.path.join(root, relative), exist_ok=True)


def link_error(link: str) -> StorageError:
    """The error that a symbolic link is in the place of a directory of a run."""
    return StorageError(
        f"{link}: expected a directory, got a symbolic link, which is not followed: it may lead out of the run "
        "directory. Delete the link, or replace it by the directory"
    )


def walk_local(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each file under a directory, by relative path with forward slashes, in a stable order.

    A link to a file counts as the file, a link to a directory is not followed, and other things are left out.
    """
    for relative, entry in walk_entries(directory):
        with contextlib.suppress(FileNotFoundError):  # a link to nothing
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                yield relative, status


def walk_entries(directory: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything under a directory but directories, in the same order, and without a look at each."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(os.path.join(directory, prefix)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        below = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                below.append(f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}", entry
        pending += reversed(below)


def checksum(path: str) -> int:
    """The CRC-32 of a local file."""
    value = 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(1 << 20):
            value = zlib.crc32(data, value)
    return value


def flush_to_disk(path: str) -> None:
    """Has the operating system write a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
