"""The run directory, wherever it is: put, get, list, delete and atomic write."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import posixpath
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, TypeVar

from drivetrain._base.crashpoints import reach
from drivetrain._storage.copying import Claims, copy_files, copy_part, duplicates_of, same_content
from drivetrain._storage.filesystem import (
    CHUNK_BYTES,
    Filesystem,
    StoredFile,
    checksum,
    data_ranges,
    find_link,
    flush_to_disk,
    link_error,
    make_below,
    walk_entries,
    walk_local,
)
from drivetrain._storage.layout import RUN_FILE, VERSION, check_version, file_mode, require_relative
from drivetrain._storage.reading import Fields, open_regular, parse_json, read_regular, size_limit
from drivetrain._storage.remote import locate
from drivetrain._storage.transfer import Job, Limits, explain, run_jobs
from drivetrain.errors import CheckpointError, StorageError

__all__ = ["Storage", "open_storage", "quick", "runs_location"]

T = TypeVar("T")

_BATCH_FILES = 64
_PROBE_S = 30.0


class Storage:
    """A directory tree on some filesystem; every name given to its methods is relative to ``root``.

    No method leaves the tree. A name that would is refused, and so is a change behind a symbolic link below ``root``.

    Args:
        filesystem: what it is on.
        root: its path there.
        limits: the bounds of its transfers.
    """

    def __init__(self, filesystem: Filesystem, root: str, limits: Limits | None = None) -> None:
        self.filesystem = filesystem
        self.root = root
        self.limits = limits or Limits()

    def __repr__(self) -> str:
        return f"Storage({self.filesystem!r}, {self.root!r})"

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's filesystem, or mounted there."""
        return self.filesystem.is_local

    def path(self, *parts: str) -> str:
        """The path of something in the storage, on its filesystem.

        Raises:
            StorageError: the path would be outside the storage.
        """
        return posixpath.join(self.root, *[require_relative(part, self.root) for part in parts if part])

    def inside(self, name: str) -> Storage:
        """The storage of a directory in this one.

        Raises:
            StorageError: the name leaves this directory, or a symbolic link does.
        """
        self._require_no_link(name)
        return Storage(self.filesystem, self.path(name), self.limits)

    def find_link(self, name: str) -> str | None:
        """The first symbolic link on the way from the root to a name, the name included; None without one."""
        self.path(name)
        return find_link(self.root, name) if self.is_local else None

    def exists(self, name: str) -> bool:
        """Whether a file or directory of that name is there."""
        return self.call(f"look for {name}", lambda: self.filesystem.exists(self.path(name)))

    def read_bytes(self, name: str) -> bytes | None:
        """Returns the content of a file, or None if there is no such file.

        Raises:
            StorageError: the file cannot be read, exceeds its size limit, or is not a regular file.
        """
        limit = size_limit(name)

        def read() -> bytes | None:
            try:
                if self.is_local:
                    return read_regular(self.root, name, limit)
                return self.filesystem.read_bytes(self.path(name), limit)
            except FileNotFoundError:
                return None

        return self.call(f"read {name}", read)

    def read_json(self, name: str) -> Fields | None:
        """Returns the fields of a JSON file, or None if there is no such file.

        Raises:
            StorageError: the file cannot be read, or is not a JSON object.
        """
        data = self.read_bytes(name)
        return None if data is None else Fields(parse_json(data, self.path(name)), self.path(name))

    def read_any_json(self, name: str) -> Any:
        """Return the value of a JSON file of any type, or None if there is no such file.

        Raises:
            StorageError: the file cannot be read, or is not JSON.
        """
        data = self.read_bytes(name)
        return None if data is None else parse_json(data, self.path(name))

    @contextlib.contextmanager
    def open_local(self, name: str) -> Iterator[BinaryIO]:
        """Opens a file of a local directory for reading, for the time of a ``with`` block.

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
        """Open a file for reading, for the duration of a ``with`` block; a file in a bucket is first read as a whole.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file cannot be read, is not a regular file, or is in a bucket and exceeds its size limit.
        """
        if self.is_local:
            with self.open_local(name) as file:
                yield file
            return
        data = self.read_bytes(name)
        if data is None:
            raise FileNotFoundError(self.path(name))
        yield io.BytesIO(data)

    def write_bytes(
        self, name: str, data: bytes, *, durable: bool = True, midway: Callable[[], None] | None = None
    ) -> None:
        """Replaces a file atomically.

        Args:
            name: the file.
            data: its new content.
            durable: it is on the disk when this returns, and so survives a power failure.
            midway: called when everything is written, and before anybody can see it.
        """
        self._require_no_link(posixpath.dirname(name))
        self.call(
            f"write {name}",
            lambda: self.filesystem.write_bytes(
                self.path(name), data, durable=durable, midway=midway, mode=file_mode(name)
            ),
        )

    def flush_to_disk(self, name: str) -> None:
        """Has a local directory survive a power failure, with all files in it."""
        if not self.is_local:
            return
        with contextlib.suppress(OSError):  # another driver's business by now
            directories = {self.path(name)}
            for relative, _ in walk_local(self.path(name)):
                flush_to_disk(self.path(name, relative))
                directories.add(os.path.dirname(self.path(name, relative)))
            for directory in [*directories, self.root]:
                flush_to_disk(directory)

    def list_names(self, name: str = "") -> tuple[list[str], list[str]]:
        """The names of the directories and of the files directly in a directory, each sorted."""
        return self.call(f"list {name or 'the run'}", lambda: self.filesystem.list_names(self.path(name)))

    def walk(self, name: str) -> dict[str, int]:
        """The size in bytes of each file under a directory, by relative path; none behind a symbolic link.

        Raises:
            StorageError: an object of a bucket has a path that leaves the directory.
        """
        if self.find_link(name) is not None:
            return {}
        sizes = self.call(f"list {name}", lambda: self.filesystem.walk(self.path(name)))
        if not self.is_local:
            for relative in sizes:
                require_relative(relative, self.path(name))
        return sizes

    def delete(self, name: str) -> None:
        """Deletes a file, a directory tree or a link (and not its target); nothing happens where there is none.

        Raises:
            StorageError: the name is not below the root, or a directory above it is a symbolic link.
        """
        require_relative(name, self.root)
        self._require_no_link(posixpath.dirname(name))
        self.call(f"delete {name}", lambda: self.filesystem.delete(self.path(name)))

    def require_run(self, run_id: str, start: int | None = None) -> None:
        """Makes sure that this is the run's directory also as this process, maybe on another node, sees it.

        Args:
            run_id: the id that the driver has written into the directory.
            start: how many drivers have worked on the run, the worker's own included; None for whatever it is.

        Raises:
            StorageError: it is not, or another driver has taken the run over.
        """
        facts = self.read_json(RUN_FILE)
        if facts is None or facts.values.get("id") != run_id:
            raise StorageError(
                f"the run directory {self.root} is not the driver's on {socket.gethostname()}: a run on several nodes "
                "expected a storage_path that all of them share, such as a network filesystem or a bucket"
            )
        if start is not None and facts.values.get("starts") != start:
            raise StorageError(
                f"the run directory {self.root} has been taken over by another driver: this worker's run is over"
            )

    def require_known_version(self) -> None:
        """Refuses a run directory in a newer format than this release knows.

        Raises:
            StorageError: a newer drivetrain wrote ``run.json``, or the file is damaged.
        """
        stored = self.read_json(RUN_FILE)
        if stored is not None:
            check_version(stored.integer("version", VERSION), self.path(RUN_FILE))

    def put_directory(
        self, source: str, name: str, *, rank: int = 0, give_away: bool = False, checksums: bool = False,
        polite: bool = False,
    ) -> dict[str, StoredFile]:  # fmt: skip
        """Stores the files of a local directory in the directory ``name``, where other ranks may put theirs too.

        On a local filesystem, a file that another rank has put already is stored under ``.rank_<rank>/`` instead;
        whoever commits the directory settles what that means (:func:`settle_duplicates`). Elsewhere the last one
        stays, and the checksums, which are always taken there, tell.

        Args:
            source: the local directory.
            name: the directory in the storage; it is made where it is missing.
            rank: the rank on whose behalf the files are put.
            give_away: the files may be moved instead of copied.
            checksums: take checksums also of local copies.
            polite: give way to the threads that train.

        Returns:
            What is known of each file, by its path relative to ``source`` with forward slashes.

        Raises:
            CheckpointError: ``source`` is no directory, or has no files.
            StorageError: a file could not be stored.
        """
        if not os.path.isdir(source):
            raise CheckpointError(
                f"a checkpoint: expected a directory that exists, found none at {source}: write the files before "
                "reporting"
            )
        found = dict(walk_local(source))
        if not found:
            raise CheckpointError(
                f"a checkpoint: expected a directory with at least one file, got {source} empty: "
                "write the files before reporting"
            )
        limits = replace(self.limits, polite=True) if polite else self.limits
        self._require_no_link(name)
        reach("before upload")
        try:
            if not self.is_local:
                stored = self._upload(source, name, found, limits)
            elif give_away and self._take_over(source, name):
                stored = _describe(self.path(name), found, checksums)
            else:
                stored = self._copy(source, name, found, rank, checksums, limits)
        except OSError as error:
            raise StorageError(
                f"cannot store the checkpoint {source} in {self.path(name)}: {explain(error)}"
            ) from error
        reach("after upload")
        return stored

    def settle_duplicates(self, name: str, files: Mapping[int, Mapping[str, StoredFile]]) -> None:
        """Drops the files that several ranks put with the same content.

        Args:
            name: the directory that the ranks put their files into.
            files: what :meth:`put_directory` returned, by rank.

        Raises:
            CheckpointError: two ranks put different content under one path; the message names the path and ranks.
        """
        first: dict[str, StoredFile] = {}
        for rank in sorted(files):
            for relative, facts in files[rank].items():
                other = first.setdefault(relative, facts)
                if other.size != facts.size or (other.crc32 or facts.crc32) != (facts.crc32 or other.crc32):
                    raise _collision(name, relative, files)
        if not self.is_local:
            return
        for rank in sorted(files):
            duplicates = self.path(name, duplicates_of(rank))
            if not os.path.isdir(duplicates):
                continue
            self._require_no_link(f"{name}/{duplicates_of(rank)}")
            for relative, _ in walk_local(duplicates):
                own, first_one = os.path.join(duplicates, relative), self.path(name, relative)
                if not os.path.lexists(first_one):  # of a rank that could not store it in the end
                    make_below(self.path(name), posixpath.dirname(relative))
                    os.rename(own, first_one)
                elif not same_content(own, first_one):
                    raise _collision(name, relative, files)
            self.filesystem.delete(duplicates)

    def find_damage(self, name: str, files: Mapping[str, StoredFile], *, checksums: bool = False) -> str | None:
        """What is wrong with a stored directory, in words; None where every file is there and as long as it was.

        Args:
            name: the directory.
            files: what it should hold.
            checksums: also read local files whose checksum is known.
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
        """Return why :meth:`walk` does not find a file of a stored directory."""
        if (link := self.find_link(posixpath.join(name, relative))) is not None:
            return f"{link} is a symbolic link. Links are refused in a stored checkpoint: replace it by its target"
        return f"{self.path(name, relative)} is missing"

    def get_directory(
        self, name: str, target: str, *, files: Mapping[str, StoredFile] | None = None,
        include: Sequence[str] | None = None, exclude: Sequence[str] | None = None,
    ) -> list[str]:  # fmt: skip
        """Copies the files of a directory, or some of them, into a local directory.

        Args:
            name: the directory in the storage.
            target: the local directory; made where it is missing.
            files: what is known of the files; their sizes, and checksums where there are, are checked.
            include: patterns of the paths to copy; a pattern that a directory matches stands for all in it.
            exclude: patterns of the paths to leave out.

        Returns:
            The relative paths that were copied.

        Raises:
            StorageError: a file could not be copied, or is not what it should be.
        """

        def is_wanted(relative: str) -> bool:
            return (not include or _matches(relative, include)) and not (exclude and _matches(relative, exclude))

        sizes = {relative: size for relative, size in self.walk(name).items() if is_wanted(relative)}
        for relative in files or ():
            if relative not in sizes and is_wanted(relative):
                raise CheckpointError(f"{self._explain_missing(name, relative)}. Use another checkpoint")
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
        for relative, facts in (files or {}).items():
            if relative not in sizes:
                continue
            local = os.path.join(target, relative)
            if sizes[relative] != facts.size or (facts.crc32 is not None and checksum(local) != facts.crc32):
                raise CheckpointError(
                    f"{self.path(name, relative)} is damaged: expected {facts.size} bytes with the checksum from the "
                    f"upload, got {sizes[relative]} bytes. Use another checkpoint"
                )
        return sorted(sizes)

    def _ranges(self, name: str, relative: str, size: int) -> Sequence[tuple[int, int]]:
        """The pieces of a file that are worth copying: a big local one may have holes."""
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

    def _upload(
        self, source: str, name: str, found: Mapping[str, os.stat_result], limits: Limits
    ) -> dict[str, StoredFile]:
        order = sorted(found, key=lambda relative: -found[relative].st_size)
        jobs = [
            Job(relative, partial(self.filesystem.put_file, os.path.join(source, relative), self.path(name, relative)))
            for relative in order
        ]
        what = f"upload of {self.path(name)}"
        stored = dict(zip(order, run_jobs(jobs, what=what, limits=limits), strict=True))
        if (damage := self.find_damage(name, stored)) is not None:
            raise StorageError(f"{what} is not complete: {damage}")
        return stored

    def _take_over(self, source: str, name: str) -> bool:
        """Moves a directory as a whole, if that is possible and means the same as copying it."""
        if has_links(source):
            return False
        target = self.path(name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.rename(source, target)
        except OSError:  # another filesystem, or another rank's files are there
            return False
        with contextlib.suppress(OSError):  # a temporary directory is its owner's alone
            os.chmod(target, stat.S_IMODE(os.stat(self.root).st_mode))
        return True

    def _copy(
        self, source: str, name: str, found: Mapping[str, os.stat_result], rank: int, checksums: bool, limits: Limits
    ) -> dict[str, StoredFile]:
        claims = Claims(self.path(name), rank)
        try:
            self._copy_claimed(source, found, claims, limits)
        except BaseException:
            claims.withdraw()
            raise
        return _describe(source, found, checksums)

    def _copy_claimed(self, source: str, found: Mapping[str, os.stat_result], claims: Claims, limits: Limits) -> None:
        target = claims.target
        made: set[str] = set()
        jobs: list[Job[None]] = []
        batch: list[tuple[str, str, int]] = []
        for relative, status in found.items():
            origin = os.path.join(source, relative)
            if (parent := posixpath.dirname(relative)) not in made:
                make_below(target, parent)
                made.add(parent)
            if status.st_size <= CHUNK_BYTES:
                batch.append((origin, relative, status.st_mode))
                if len(batch) == _BATCH_FILES:
                    jobs.append(Job(relative, partial(copy_files, batch, claims)))
                    batch = []
                continue
            descriptor = claims.claim(relative, status.st_mode)
            try:
                os.truncate(descriptor, status.st_size)
                destination = os.readlink(f"/proc/self/fd/{descriptor}")
            finally:
                os.close(descriptor)
            with open(origin, "rb", buffering=0) as file:
                for start, count in data_ranges(file.fileno(), status.st_size, status.st_blocks * 512):
                    jobs.append(Job(relative, partial(copy_part, origin, destination, start, count)))
        if batch:
            jobs.append(Job(batch[0][1], partial(copy_files, batch, claims)))
        several = len(jobs) > 1
        if several:
            limits = replace(limits, threads=min(limits.threads, os.cpu_count() or 1))
        run_jobs(jobs, what=f"copy of {source} to {target}", limits=limits, in_thread=several)

    def _require_no_link(self, name: str) -> None:
        if (link := self.find_link(name)) is not None:
            raise link_error(link)

    def call(self, action: str, operation: Callable[[], T]) -> T:
        """Calls an operation of the filesystem and returns its result, with a deadline if it uses a network.

        Args:
            action: what the operation does, for messages: ``"read run.json"``.
            operation: the call.

        Raises:
            StorageError: it failed, or took too long.
        """
        (result,) = run_jobs(
            [Job(self.root, operation)], what=f"cannot {action}:", limits=self.limits, in_thread=not self.is_local
        )
        return result


def quick(storage: Storage) -> Storage:
    """The same storage for someone who wants to know soon whether it can be used."""
    limits = replace(storage.limits, deadline_s=min(storage.limits.deadline_s, _PROBE_S), attempts=3)
    return Storage(storage.filesystem, storage.root, limits)


def open_storage(storage: Storage) -> None:
    """Makes the directory where it is missing, and finds out whether it can be written.

    On an object store, where there are no directories, the first file that is written will tell.

    Raises:
        StorageError: it is a file, or cannot be made or written.
    """
    if not storage.is_local:
        storage.call("make the run directory", partial(storage.filesystem.make_directory, storage.root))
        return
    try:
        os.makedirs(storage.root, exist_ok=True)
        with tempfile.TemporaryFile(dir=storage.root):
            pass
    except FileExistsError:
        raise StorageError(f"the run directory {storage.root} is a file: choose another path") from None
    except NotADirectoryError:
        raise StorageError(f"the run directory {storage.root} has a file above it: choose another path") from None
    except OSError as error:
        raise StorageError(
            f"the run directory {storage.root} cannot be written ({explain(error)}): "
            "choose another storage_path, or mend its permissions"
        ) from error


def runs_location(storage_path: str | os.PathLike[str] | None, filesystem: object | None = None) -> Storage:
    """The directory that runs are kept in.

    Args:
        storage_path: as in :class:`~drivetrain.RunConfig`.
        filesystem: as in :class:`~drivetrain.RunConfig`.

    Raises:
        ConfigurationError: the path is on a storage that cannot be used.
    """
    if storage_path is None:
        storage_path = os.environ.get("DRIVETRAIN_STORAGE_PATH") or "~/drivetrain_results"
    return Storage(*locate(storage_path, filesystem, what="storage_path"))


def _describe(directory: str, found: Mapping[str, os.stat_result], checksums: bool) -> dict[str, StoredFile]:
    return {
        relative: StoredFile(status.st_size, checksum(os.path.join(directory, relative)) if checksums else None)
        for relative, status in found.items()
    }


def _make_parent(path: str, made: set[str]) -> None:
    parent = os.path.dirname(path)
    if parent not in made:
        os.makedirs(parent, exist_ok=True)
        made.add(parent)


def has_links(directory: str) -> bool:
    """Whether moving a directory would move a link, and not what it stands for."""
    return os.path.islink(directory) or any(entry.is_symlink() for _, entry in walk_entries(directory))


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    names = [relative]
    while parent := posixpath.dirname(names[-1]):
        names.append(parent)
    return any(fnmatch.fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns for name in names)


def _collision(name: str, relative: str, files: Mapping[int, Mapping[str, StoredFile]]) -> CheckpointError:
    owners = [rank for rank in sorted(files) if relative in files[rank]]
    return CheckpointError(
        f"ranks {' and '.join(map(str, owners))} reported {relative!r} for {name} with "
        "different content: report the file from one rank only, or put the rank into its name"
    )
