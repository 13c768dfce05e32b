"""The run directory: put, get, list, delete and atomic write.

**How a write is atomic.** The bytes go to a temporary file beside the target, which is flushed to the disk, renamed
over the target, and made durable by flushing the directory. A reader, or a process started after a crash at any
instant, sees the old file or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from drivetrain.errors import CheckpointError, ConfigurationError, StorageError

__all__ = ["RUN_FILE", "Storage", "open_storage", "runs_directory"]

RUN_FILE = "run.json"


class Storage:
    """A directory tree on this machine's filesystem; every path given to its methods is relative to ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"Storage({str(self.root)!r})"

    def path(self, *parts: str) -> Path:
        """The absolute path of something in the storage."""
        return self.root.joinpath(*parts)

    def exists(self, name: str) -> bool:
        """Whether a file or directory of that name is there."""
        return self.path(name).exists()

    def read_bytes(self, name: str) -> bytes | None:
        """The content of a file, or None where there is none."""
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            return None

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replaces a file atomically and durably (see the module's docstring)."""
        target = self.path(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, target)
                except BaseException:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file.name)
                    raise
            _flush_directory(target.parent)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error.strerror or error}") from error

    def list_directories(self) -> list[str]:
        """The names of the directories directly under the root, sorted."""
        if not self.root.exists():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))

    def delete(self, name: str) -> None:
        """Deletes a file or a directory tree; nothing happens where there is none."""
        target = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def require_run(self, run_id: str) -> None:
        """Makes sure that this is the run's directory also as this process, maybe on another node, sees it.

        Args:
            run_id: the id that the driver has written into the directory.

        Raises:
            StorageError: it is not.
        """
        facts = self.read_bytes(RUN_FILE)
        if facts is None or json.loads(facts)["id"] != run_id:
            raise StorageError(
                f"the run directory {self.root} is not the driver's on {socket.gethostname()}: a run on several nodes "
                "wants a storage_path that all of them share, such as a network filesystem"
            )

    def put_directory(self, source: Path, name: str, *, rank: int) -> dict[str, int]:
        """Copies the files of a local directory into the directory ``name``, where other ranks may put theirs too.

        A file that another rank has put already is stored under ``.rank_<rank>/`` instead; whoever commits the
        directory settles what that means (:func:`settle_duplicates`).

        Args:
            source: the local directory.
            name: the directory in the storage; it is made where it is missing.
            rank: the rank on whose behalf the files are put.

        Returns:
            The size in bytes of each file, by its path relative to ``source`` with forward slashes.

        Raises:
            CheckpointError: ``source`` is no directory, or has no files.
            StorageError: a file could not be copied.
        """
        if not source.is_dir():
            raise CheckpointError(
                f"a checkpoint wants a directory that exists, found none at {source}: write the files before reporting"
            )
        target = self.path(name)
        sizes: dict[str, int] = {}
        try:
            for file in walk_files(source):
                relative = file.relative_to(source)
                sizes[relative.as_posix()] = file.stat().st_size
                destination = target / relative
                destination.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.close(os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                except FileExistsError:
                    destination = target / _duplicates_of(rank) / relative
                    destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, destination)
                shutil.copymode(file, destination)
        except OSError as error:
            raise StorageError(f"cannot copy the checkpoint {source} to {target}: {error}") from error
        if not sizes:
            raise CheckpointError(
                f"a checkpoint wants a directory with at least one file, found {source} empty: "
                "write the files before reporting"
            )
        return sizes

    def settle_duplicates(self, name: str, files: dict[int, dict[str, int]]) -> None:
        """Drops the files that several ranks put with the same content.

        Args:
            name: the directory that the ranks put their files into.
            files: what :meth:`put_directory` returned, by rank.

        Raises:
            CheckpointError: two ranks put different content under one path; the message names the path and ranks.
        """
        for rank in sorted(files):
            duplicates = self.path(name, _duplicates_of(rank))
            if not duplicates.is_dir():
                continue
            for file in walk_files(duplicates):
                relative = file.relative_to(duplicates)
                if not _same_content(file, self.path(name) / relative):
                    owners = [other for other in sorted(files) if relative.as_posix() in files[other]]
                    raise CheckpointError(
                        f"ranks {' and '.join(map(str, owners))} reported {relative.as_posix()!r} for {name} with "
                        "different content: report the file from one rank only, or put the rank into its name"
                    )
            shutil.rmtree(duplicates)


def open_storage(directory: Path) -> Storage:
    """Makes the directory where it is missing, and finds out whether it can be written.

    Raises:
        StorageError: it is a file, or cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise StorageError(f"the run directory {directory} is a file: choose another path") from None
    except NotADirectoryError:
        raise StorageError(f"the run directory {directory} has a file above it: choose another path") from None
    except OSError as error:
        raise StorageError(
            f"the run directory {directory} cannot be written ({error.strerror}): "
            "choose another storage_path, or mend its permissions"
        ) from error
    return Storage(directory)


def runs_directory(storage_path: str | os.PathLike[str] | None, filesystem: object | None = None) -> Path:
    """The directory that runs are kept in.

    Args:
        storage_path: as in :class:`~drivetrain.RunConfig`.
        filesystem: as in :class:`~drivetrain.RunConfig`.

    Raises:
        ConfigurationError: the path is on a storage that this version cannot use.
    """
    if filesystem is not None:
        raise ConfigurationError(
            f"RunConfig(storage_filesystem=...) is for storages off this machine, which this version does not "
            f"support yet, found {filesystem!r}: use a storage_path on a local or mounted filesystem"
        )
    if storage_path is None:
        storage_path = os.environ.get("DRIVETRAIN_STORAGE_PATH") or "~/drivetrain_results"
    text = os.fspath(storage_path)
    if text.startswith("file://"):
        text = text[len("file://") :]
    elif "://" in text:
        raise ConfigurationError(
            f"storage_path wants a path on a local or mounted filesystem, found {text!r}: "
            "this version does not support other storages yet"
        )
    return Path(text).expanduser().absolute()


def walk_files(directory: Path) -> Iterator[Path]:
    """The files under a directory, at any depth, in a stable order; links are followed to files only."""
    for parent, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            yield Path(parent, name)


def _duplicates_of(rank: int) -> str:
    return f".rank_{rank}"


def _same_content(one: Path, other: Path, block_bytes: int = 1 << 20) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while block := left.read(block_bytes):
            if block != right.read(block_bytes):
                return False
    return True


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
