"""Operations on a directory in local or remote storage: read, list, delete, download and atomic write."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import posixpath
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

from drivetrain._storage.checksums import checksum
from drivetrain._storage.filesystem import (
    CHUNK_BYTES,
    Filesystem,
    RemoteFilesystem,
    StoredFile,
    data_ranges,
    find_link,
    flush_to_disk,
    link_error,
    walk_local,
)
from drivetrain._storage.layout import RUN_FILE, SEGMENTS, VERSION, check_version, grows, require_relative, run_file
from drivetrain._storage.reading import Fields, open_regular, parse_json, read_regular
from drivetrain._storage.remote import locate
from drivetrain._storage.segments import open_growing, read_growing
from drivetrain._storage.transfer import Job, Limits, explain, run_jobs
from drivetrain.errors import CheckpointError, RunInUseError, StorageError

__all__ = ["Storage", "open_storage", "runs_location", "with_short_deadline"]

T = TypeVar("T")

_PROBE_S = 30.0
_PROBE_BYTES = 1 << 16


class Storage:
    """A directory tree on some filesystem. The names in the arguments of its methods are relative to ``root``.

    The methods never leave the tree: they reject names that lead out of it, and changes through a symbolic link below
    ``root``.

    Args:
        filesystem: the filesystem of the directory.
        root: the path of the directory on the filesystem.
        limits: the limits of transfers, such as the deadline; None for the defaults.

    Attributes:
        root: the path of the directory on the filesystem.
        filesystem: the filesystem of the directory. Its attribute ``handle`` is the object of fsspec or pyarrow that
            functions such as :meth:`Result.from_path() <drivetrain.Result.from_path>` accept as ``storage_filesystem``.
    """

    def __init__(self, filesystem: Filesystem, root: str, limits: Limits | None = None) -> None:
        self.filesystem = filesystem
        self.root = root
        self.limits = limits or Limits()

    def __repr__(self) -> str:
        return f"Storage({self.filesystem!r}, {self.root!r})"

    @property
    def is_local(self) -> bool:
        """True if the directory is on this machine's filesystem, or mounted there."""
        return self.filesystem.is_local

    @property
    def remote(self) -> RemoteFilesystem:
        """The filesystem of a storage that is not local."""
        return cast("RemoteFilesystem", self.filesystem)

    def path(self, *parts: str) -> str:
        """Return the path on the filesystem of a file or directory in the storage.

        Args:
            parts: its name, or the parts of its name to join. Empty parts are ignored.

        Raises:
            StorageError: the path would be outside of the storage.
        """
        return posixpath.join(self.root, *[require_relative(part, self.root) for part in parts if part])

    def inside(self, name: str) -> Storage:
        """Return a storage whose root is a directory of this storage.

        Raises:
            StorageError: the name leads out of this storage, or contains a symbolic link.
        """
        self.require_no_link(name)
        return Storage(self.filesystem, self.path(name), self.limits)

    def find_link(self, name: str) -> str | None:
        """Return the path of the first symbolic link among the components of a name, last one included, or None."""
        self.path(name)
        return find_link(self.root, name) if self.is_local else None

    def exists(self, name: str) -> bool:
        """Return True if a file or directory with this name exists."""
        if self.call(f"look for {name}", lambda: self.filesystem.exists(self.path(name))):
            return True
        return not self.is_local and grows(name) and self.exists(f"{SEGMENTS}/{name}")

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is no such file. A file in segments is put together.

        Raises:
            StorageError: the file cannot be read, exceeds its size limit, or is not a regular file.
        """
        return read_growing(self, name) if not self.is_local and grows(name) else self.read_object(name)

    def read_object(self, name: str) -> bytes | None:
        """Return the content of a file or object with exactly this name, or None if there is none.

        Raises:
            StorageError: the file cannot be read, exceeds its size limit, or is not a regular file.
        """
        limit = run_file(name).limit

        def read() -> bytes | None:
            try:
                if self.is_local:
                    return read_regular(self.root, name, limit)
                return self.remote.read_bytes(self.path(name), limit)
            except FileNotFoundError:
                return None

        return self.call(f"read {name}", read)

    def read_json(self, name: str) -> Fields | None:
        """Return the fields of a JSON file, or None if there is no such file.

        Raises:
            StorageError: the file cannot be read, or is not a JSON object.
        """
        data = self.read_bytes(name)
        return None if data is None else Fields(parse_json(data, self.path(name)), self.path(name))

    def read_any_json(self, name: str) -> Any:
        """Return the content of a JSON file, which may be of any JSON type, or None if there is no such file.

        Raises:
            StorageError: the file cannot be read, or is not JSON.
        """
        data = self.read_bytes(name)
        return None if data is None else parse_json(data, self.path(name))

    @contextlib.contextmanager
    def open_local(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of a local directory for reading, for the duration of a ``with`` block.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file cannot be read, or is not a regular file.
        """
        try:
            descriptor = open_regular(self.root, name)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {self.path(name)}: {explain(error)}") from error
        with open(descriptor, "rb") as file:
            yield file

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading, for the duration of a ``with`` block.

        Of a remote file that grows, such as a log, only the segments that are read are downloaded. Another remote file
        is first read into memory.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file cannot be read, is not a regular file, or is remote and exceeds its size limit.
        """
        if self.is_local:
            with self.open_local(name) as file:
                yield file
            return
        if grows(name):
            with open_growing(self, name) as file:
                yield file
            return
        data = self.read_bytes(name)
        if data is None:
            raise FileNotFoundError(self.path(name))
        yield io.BytesIO(data)

    def write_bytes(
        self, name: str, data: bytes, *, durable: bool = True, guard: Callable[[], None] = lambda: None
    ) -> None:
        """Replace a file atomically.

        Args:
            name: the file.
            data: its new content.
            durable: flush the file to the disk before this method returns, so that it survives a power failure.
            guard: called directly before the file is replaced. If it raises an exception, the file stays as it is.
        """
        self.require_no_link(posixpath.dirname(name))
        path, mode = self.path(name), run_file(name).mode
        self.call(
            f"write {name}",
            lambda: self.filesystem.write_bytes(path, data, durable=durable, mode=mode, guard=guard),
        )

    def flush_to_disk(self, name: str) -> None:
        """Flush a local directory and all files in it to the disk, so that they survive a power failure."""
        if not self.is_local:
            return
        with contextlib.suppress(OSError):  # another driver may have deleted the directory
            directories = {self.path(name)}
            for relative, _ in walk_local(self.path(name)):
                flush_to_disk(self.path(name, relative))
                directories.add(os.path.dirname(self.path(name, relative)))
            for directory in [*directories, self.root]:
                flush_to_disk(directory)

    def list_names(self, name: str = "") -> tuple[list[str], list[str]]:
        """Return the sorted names of the directories and of the files directly in a directory."""
        return self.call(f"list {name or 'the run'}", lambda: self.filesystem.list_names(self.path(name)))

    def walk(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file under a directory, by relative path. Links to directories are skipped.

        Raises:
            StorageError: a remote file has a path that leads out of the directory.
        """
        if self.find_link(name) is not None:
            return {}
        sizes = self.call(f"list {name}", lambda: self.filesystem.walk(self.path(name)))
        if not self.is_local:
            for relative in sizes:
                require_relative(relative, self.path(name))
        return sizes

    def delete(self, name: str) -> None:
        """Delete a file, a directory tree or a link (not its target), if it exists.

        Raises:
            StorageError: the name is not below the root, or a directory above it is a symbolic link.
        """
        require_relative(name, self.root)
        self.require_no_link(posixpath.dirname(name))
        self.call(f"delete {name}", lambda: self.filesystem.delete(self.path(name)))

    def require_run(self, run_id: str, driver_count: int | None = None) -> None:
        """Check that this process, which may be on another node, sees the run directory of the driver.

        Args:
            run_id: the id that the driver has written into the directory.
            driver_count: the number of drivers that have worked on the run, including the driver of this process. None
                does not check whether another driver has taken the run over.

        Raises:
            StorageError: this process sees another directory at the path.
            RunInUseError: another driver has taken the run over.
        """
        facts = self.read_json(RUN_FILE)
        if facts is None or facts.values.get("id") != run_id:
            raise StorageError(
                f"[DT-404] {self.root}: expected the run directory of the driver, which {socket.gethostname()} cannot "
                "see. Set a storage_path that all nodes share, such as a network filesystem or a bucket"
            )
        if driver_count is not None and facts.values.get("starts") != driver_count:
            raise RunInUseError(
                f"[DT-705] the run directory {self.root} has been taken over by another driver. This worker stops"
            )

    def require_known_version(self) -> None:
        """Reject a run directory in a newer format than this release can read.

        Raises:
            StorageError: a newer drivetrain wrote ``run.json``, or the file is damaged.
        """
        stored = self.read_json(RUN_FILE)
        if stored is not None:
            check_version(stored.integer("version", VERSION), self.path(RUN_FILE))

    def move(self, source: str, target: str) -> None:
        """Move a file within the storage, in place of a file that has the new name already."""
        for name in (source, target):
            self.require_no_link(posixpath.dirname(name))
        self.call(f"move {source}", lambda: self.filesystem.move(self.path(source), self.path(target)))

    def find_damage(self, name: str, files: Mapping[str, StoredFile], *, checksums: bool = False) -> str | None:
        """Describe the first damage to a stored directory. Return None if all files exist and have the expected size.

        Args:
            name: the directory.
            files: the expected files, by relative path.
            checksums: also read local files and compare their checksums, where the expected checksum is known.
        """
        sizes = self.walk(name)
        for relative, facts in files.items():
            if relative not in sizes:
                return self._explain_missing(name, relative)
            if sizes[relative] != facts.size:
                return f"{self.path(name, relative)} has {sizes[relative]} bytes instead of {facts.size}"
            known = facts.crc32 if checksums and self.is_local else None
            if known is not None and checksum(self.path(name, relative)) != known:
                return f"{self.path(name, relative)} has other content than was stored (CRC-32)"
        return None

    def _explain_missing(self, name: str, relative: str) -> str:
        """Explain why :meth:`walk` does not return a file that a stored directory should contain."""
        if (link := self.find_link(posixpath.join(name, relative))) is not None:
            return f"{link} is a symbolic link. Links are refused in a stored checkpoint: replace it by its target"
        return f"{self.path(name, relative)} is missing"

    def get_directory(
        self, name: str, target: str, *, files: Mapping[str, StoredFile] | None = None,
        include: Sequence[str] | None = None, exclude: Sequence[str] | None = None,
    ) -> list[str]:  # fmt: skip
        """Copy the files of a directory, or some of them, into a local directory.

        Args:
            name: the directory in the storage.
            target: the local directory, which is created if it is missing.
            files: the expected files, by relative path. The copies must have the same sizes and checksums. None does
                not check the copies.
            include: patterns of the paths to copy. A pattern that matches a directory selects all files in it.
            exclude: patterns of the paths to leave out.

        Returns:
            The relative paths of the copied files.

        Raises:
            StorageError: a file could not be copied, is missing, or differs from ``files``.
        """

        def is_selected(relative: str) -> bool:
            return (not include or _matches(relative, include)) and not (exclude and _matches(relative, exclude))

        sizes = {relative: size for relative, size in self.walk(name).items() if is_selected(relative)}
        for relative in files or ():
            if relative not in sizes and is_selected(relative):
                raise CheckpointError(f"[DT-409] {self._explain_missing(name, relative)}. Use another checkpoint")
        jobs: list[Job[None]] = []
        os.makedirs(target, exist_ok=True)
        made: set[str] = set()
        for relative, size in sorted(sizes.items(), key=lambda item: -item[1]):
            local = os.path.join(target, relative)
            _make_parent(local, made)
            with open(local, "wb") as file:
                file.truncate(size)
            for start, count in self._ranges(name, relative, size):
                jobs.append(Job(relative, partial(self._get_range, relative, name, local, start, count)))
        what = f"download of {self.path(name)}"
        run_jobs(jobs, what=what, limits=self.limits, in_thread=not self.is_local or len(jobs) > 4)

        def verify(relative: str, facts: StoredFile) -> None:
            local = os.path.join(target, relative)
            if sizes[relative] != facts.size or (facts.crc32 is not None and checksum(local) != facts.crc32):
                raise CheckpointError(
                    f"[DT-409] {self.path(name, relative)} is damaged: expected {facts.size} bytes with the checksum "
                    f"from the upload, got {sizes[relative]} bytes. Use another checkpoint"
                )

        known = {relative: facts for relative, facts in (files or {}).items() if relative in sizes}
        checks = [Job(relative, partial(verify, relative, facts)) for relative, facts in known.items()]
        run_jobs(checks, what=f"check of {self.path(name)}", limits=self.limits, in_thread=len(checks) > 4)
        return sorted(sizes)

    def _ranges(self, name: str, relative: str, size: int) -> Sequence[tuple[int, int]]:
        """Return the ranges of a file to copy, as (start, count). The holes of a large local file are skipped."""
        if self.is_local and size > CHUNK_BYTES:
            with open(self.path(name, relative), "rb", buffering=0) as file:
                return list(data_ranges(file.fileno(), size, os.fstat(file.fileno()).st_blocks * 512))
        return [(start, min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES)]

    def _get_range(self, relative: str, name: str, local: str, start: int, count: int) -> None:
        descriptor = os.open(local, os.O_WRONLY)
        try:
            self.filesystem.get_range(self.path(name, relative), descriptor, start, count)
        finally:
            os.close(descriptor)

    def require_no_link(self, name: str) -> None:
        """Check that a name contains no symbolic link.

        Raises:
            StorageError: a component of the name is a symbolic link.
        """
        if (link := self.find_link(name)) is not None:
            raise link_error(link)

    def call(self, action: str, operation: Callable[[], T]) -> T:
        """Run an operation of the filesystem and return its result. An operation on remote storage has a deadline.

        Args:
            action: the name of the operation in messages, such as ``"read run.json"``.
            operation: the function that performs the operation.

        Raises:
            StorageError: the operation failed, or took too long.
        """
        (result,) = run_jobs(
            [Job(self.root, operation)], what=f"cannot {action}:", limits=self.limits, in_thread=not self.is_local
        )
        return result


def with_short_deadline(storage: Storage) -> Storage:
    """Return the same storage with a short deadline and few retries, for checks that should fail fast."""
    limits = replace(storage.limits, deadline_s=min(storage.limits.deadline_s, _PROBE_S), attempts=3)
    return Storage(storage.filesystem, storage.root, limits)


def open_storage(storage: Storage) -> None:
    """Create the directory of a storage if it is missing, and check that a local directory is writable.

    An object store has no directories, so the first write shows whether it is writable.

    Raises:
        StorageError: the path is a file, or the directory cannot be created or written.
    """
    if not storage.is_local:
        storage.call("make the run directory", partial(storage.remote.make_directory, storage.root))
        return
    try:
        os.makedirs(storage.root, exist_ok=True)
        with tempfile.TemporaryFile(dir=storage.root) as probe:
            probe.write(bytes(_PROBE_BYTES))  # an empty file fits on a full disk
    except FileExistsError:
        raise StorageError(
            f"[DT-401] {storage.root}: expected a run directory, got a file. Choose another path"
        ) from None
    except NotADirectoryError:
        raise StorageError(
            f"[DT-401] {storage.root}: expected directories above the run directory, got a file. Choose another path"
        ) from None
    except OSError as error:
        raise StorageError(
            f"[DT-401] the run directory {storage.root} cannot be written ({explain(error)}). "
            "Choose another storage_path, or correct its permissions"
        ) from error


def runs_location(storage_path: str | os.PathLike[str] | None, filesystem: object | None = None) -> Storage:
    """Return the directory that contains the run directories.

    Args:
        storage_path: as in :class:`~drivetrain.RunConfig`. None uses the environment variable
            ``DRIVETRAIN_STORAGE_PATH``, or ``~/drivetrain_results`` if it is not set.
        filesystem: as in :class:`~drivetrain.RunConfig`.

    Raises:
        ConfigurationError: the path is on a storage that cannot be used.
    """
    if storage_path is None:
        storage_path = os.environ.get("DRIVETRAIN_STORAGE_PATH") or "~/drivetrain_results"
    return Storage(*locate(storage_path, filesystem, what="storage_path"))


def _make_parent(path: str, made: set[str]) -> None:
    parent = os.path.dirname(path)
    if parent not in made:
        os.makedirs(parent, exist_ok=True)
        made.add(parent)


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    names = [relative]
    while parent := posixpath.dirname(names[-1]):
        names.append(parent)
    return any(fnmatch.fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns for name in names)
