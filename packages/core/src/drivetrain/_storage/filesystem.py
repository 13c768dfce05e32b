"""The interface of a filesystem, and the local filesystem, which requires only the standard library.

**Atomic writes.** On a local filesystem, the bytes are written to a draft next to the target. The draft is flushed to
the disk and renamed to the target, and the directory is flushed as well. A reader, or a process that starts after a
crash, sees the old file or the new one, never an incomplete file. On an object store, an object becomes visible only
when its put is complete, so a single put is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drivetrain._base.crashpoints import reach, reach_replacement
from drivetrain._storage.layout import draft_name
from drivetrain.errors import StorageError

__all__ = [
    "CHUNK_BYTES",
    "Filesystem",
    "LocalFilesystem",
    "RemoteFilesystem",
    "StoredFile",
    "flush_to_disk",
    "walk_entries",
    "walk_local",
]

CHUNK_BYTES = 32 << 20
"""The maximum number of bytes of one file that a job copies. A larger file is copied by several jobs."""

_SMALL_BYTES = 1 << 16  # for fewer bytes, copy_file_range takes longer than its alternatives
_CANNOT_COPY_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class StoredFile(NamedTuple):
    """A file in the listing of a checkpoint: its size in bytes, and its CRC-32 if it was computed."""

    size: int
    crc32: int | None = None


class Filesystem(Protocol):
    """A tree of files. Paths are strings with forward slashes. Reading a missing file raises FileNotFoundError."""

    is_local: bool

    @property
    def handle(self) -> Any:
        """The user's filesystem object, of fsspec or of pyarrow."""
        ...

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        durable: bool = True,
        mode: int = 0o666,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace a file atomically.

        Args:
            path: the file.
            data: its new content.
            durable: flush the file to the disk before this method returns.
            mode: the permissions of the file before the umask is applied, on a filesystem that has permissions.
            guard: called directly before the file is replaced. If it raises an exception, the file stays as it is.
        """
        ...

    def exists(self, path: str) -> bool:
        """Return True if there is a file or a directory at the path."""
        ...

    def list_names(self, path: str) -> tuple[list[str], list[str]]:
        """Return the sorted names of the directories and of the files in a directory. A missing directory has none."""
        ...

    def walk(self, path: str) -> dict[str, int]:
        """Return the size in bytes of each file below a directory, by relative path. A missing directory has none."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file or a directory tree, if it exists."""
        ...

    def move(self, source: str, target: str) -> None:
        """Move a file, in place of a file that has the new path already. Create the directories above it."""
        ...

    def get_range(self, path: str, descriptor: int, start: int, count: int) -> None:
        """Copy ``count`` bytes of a file, from ``start`` on, to the same position in an open local file."""
        ...


class RemoteFilesystem(Filesystem, Protocol):
    """A filesystem that is not this machine's. On the local one, the operating system is called instead."""

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Return the content of a file. Raise a StorageError if it has more bytes than the limit."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents, if the filesystem has directories."""
        ...

    def put_file(self, source: str, path: str) -> StoredFile:
        """Store a copy of a local file. Return its size, and its checksum if it was computed."""
        ...


class LocalFilesystem:
    """The filesystem of this machine, including mounted network filesystems."""

    is_local = True

    def __repr__(self) -> str:
        return "LocalFilesystem()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalFilesystem)

    def __hash__(self) -> int:
        return hash(LocalFilesystem)

    @property
    def handle(self) -> Any:
        """The local filesystem of fsspec."""
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        durable: bool = True,
        mode: int = 0o666,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace a file atomically. The docstring of this module describes how."""
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
            guard()
            reach_replacement(path)
            os.replace(draft, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
        if durable:
            flush_to_disk(str(target.parent))

    def exists(self, path: str) -> bool:
        """Return True if there is a file or a directory at the path."""
        return os.path.exists(path)

    def list_names(self, path: str) -> tuple[list[str], list[str]]:
        """Return the names of the directories and of the files in a directory. A link counts as a file."""
        directories: list[str] = []
        files: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                (directories if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        return sorted(directories), sorted(files)

    def walk(self, path: str) -> dict[str, int]:
        """Return the size of each file below a directory. Links to files count as files."""
        return {relative: status.st_size for relative, status in walk_local(path)}

    def delete(self, path: str) -> None:
        """Delete a file, a link or a directory tree, if it exists."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def move(self, source: str, target: str) -> None:
        """Rename a file."""
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(source, target)

    def get_range(self, path: str, descriptor: int, start: int, count: int) -> None:
        """Copy a range of bytes to the same position in an open local file."""
        with open(path, "rb", buffering=0) as file:
            copy_range(file.fileno(), descriptor, start, count)


def copy_range(source: int, target: int, start: int, count: int) -> None:
    """Copy a range of bytes to the same position in another open file.

    The kernel copies large ranges. If the filesystem supports it, both files then share the copied blocks.

    Raises:
        EOFError: the source is too short.
    """
    reach("mid-file")
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
            raise EOFError(f"expected {end - start} more bytes: the file became shorter while it was read")
        start += done


def copy_file(source: int, target: int, size: int) -> None:
    """Copy a file to a new, empty one, both open at their beginning.

    A small file takes one system call: with thousands of them, the number of calls counts. A larger one is copied by
    :func:`copy_range`, which lets both files share their blocks if the filesystem supports it.
    """
    if size > _SMALL_BYTES:
        copy_range(source, target, 0, size)
        return
    reach("mid-file")
    try:
        done = os.sendfile(target, source, 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_COPY_IN_KERNEL:
            raise
        done = 0
    if done < size:
        copy_range(source, target, done, size - done)


def data_ranges(descriptor: int, size: int, allocated: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that contain data, as (start, count). A range has at most :data:`CHUNK_BYTES`.

    Args:
        descriptor: the open file.
        size: its size in bytes.
        allocated: the number of allocated bytes. If it is smaller than ``size``, the file has holes.
    """
    position = 0
    while position < size:
        begin, end = position, size
        if allocated < size:
            try:
                begin = os.lseek(descriptor, position, os.SEEK_DATA)
                end = os.lseek(descriptor, begin, os.SEEK_HOLE)
            except OSError:  # only a hole follows
                return
        for start in range(begin, end, CHUNK_BYTES):
            yield start, min(CHUNK_BYTES, end - start)
        position = end


def find_link(root: str, relative: str) -> str | None:
    """Return the path of the first symbolic link among the components of a path below ``root``, or None."""
    path = root
    for part in filter(None, relative.split("/")):
        path = os.path.join(path, part)
        if os.path.islink(path):
            return path
    return None


def make_below(root: str, relative: str) -> None:
    """Create the directory ``relative`` below ``root``, and the directories between them, without following links.

    Raises:
        StorageError: a component of the path is a symbolic link.
    """
    if (link := find_link(root, relative)) is not None:
        raise link_error(link)
    os.makedirs(os.path.join(root, relative), exist_ok=True)


def link_error(link: str) -> StorageError:
    """Return the error about a symbolic link where a directory of a run is expected."""
    return StorageError(
        f"[DT-413] {link}: expected a directory, got a symbolic link, which is not followed: it may lead out of the "
        "run directory. Delete the link, or replace it by the directory"
    )


def walk_local(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file under a directory, by relative path with forward slashes, in a stable order.

    A link to a file counts as a file. Links to directories are not followed, and special files are left out.
    """
    for relative, entry in walk_entries(directory):
        with contextlib.suppress(FileNotFoundError):  # a link without a target
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                yield relative, status


def walk_entries(directory: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield each entry under a directory except directories, in the order of :func:`walk_local`, without its status."""
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


def flush_to_disk(path: str) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
