"""Copies files into a run directory on a local filesystem, where several ranks may write at the same time."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Sequence

from drivetrain._storage.filesystem import copy_range, make_below
from drivetrain.errors import StorageError

__all__ = ["Claims", "copy_files", "copy_part", "duplicates_of", "same_content"]


class Claims:
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


def copy_files(batch: Sequence[tuple[str, str, int]], claims: Claims) -> None:
    for source_path, relative, mode in batch:
        source = os.open(source_path, os.O_RDONLY)
        try:
            copy = claims.claim(relative, mode)
            try:
                copy_range(source, copy, 0, os.fstat(source).st_size)
            finally:
                os.close(copy)
        finally:
            os.close(source)


def copy_part(source_path: str, destination: str, start: int, count: int) -> None:
    source = os.open(source_path, os.O_RDONLY)
    try:
        copy = os.open(destination, os.O_WRONLY)
        try:
            copy_range(source, copy, start, count)
        finally:
            os.close(copy)
    finally:
        os.close(source)


def duplicates_of(rank: int) -> str:
    return f".rank_{rank}"


def same_content(first: str, second: str, block_bytes: int = 1 << 20) -> bool:
    if os.path.getsize(first) != os.path.getsize(second):
        return False
    with open(first, "rb") as left, open(second, "rb") as right:
        while block := left.read(block_bytes):
            if block != right.read(block_bytes):
                return False
    return True
