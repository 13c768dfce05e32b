"""A checkpoint: a directory of files on some filesystem, with metadata beside them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain._base.notebook import as_table
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.holds import hold
from drivetrain._storage.layout import (
    LISTING_FILE,
    METADATA_FILE,
    PIN_FILE,
    VERSION,
    check_version,
    require_relative,
)
from drivetrain._storage.node import share_directory
from drivetrain._storage.reading import MAX_VALUES, Fields, count_values, parse_json, size_limit
from drivetrain._storage.remote import locate
from drivetrain.errors import CheckpointError, StorageError

__all__ = ["Checkpoint", "checkpoint_in", "own_files", "parse_listing"]

_BYTES = "__bytes__"


class Checkpoint:
    """A directory that holds whatever a train function needs to continue.

    A checkpoint is a reference, not a copy: making one reads nothing. It becomes durable when it is reported
    and committed, and then points to its place in the run directory.

    Args:
        path: a local directory, a URI such as ``s3://bucket/run/checkpoint_000003``, or a path on ``filesystem``.
        filesystem: the filesystem of pyarrow or fsspec that ``path`` is on; None for the one that it names.

    Attributes:
        path: the directory, on its filesystem.

    Raises:
        ConfigurationError: the path is on a storage that cannot be used.

    Example:
        >>> import tempfile, pathlib
        >>> directory = tempfile.mkdtemp()
        >>> _ = pathlib.Path(directory, "epoch.txt").write_text("3")
        >>> with Checkpoint.from_directory(directory).as_directory() as path:
        ...     pathlib.Path(path, "epoch.txt").read_text()
        '3'
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any | None = None) -> None:
        self._storage = Storage(*locate(path, filesystem, what="Checkpoint"))

    def __repr__(self) -> str:
        where = "" if self._storage.is_local else f", filesystem={type(self.filesystem).__name__}"
        return f"Checkpoint(path={self.path!r}{where})"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"path": self.path}
        try:
            listing = self._storage.read_bytes(LISTING_FILE)
            if listing is None:
                rows["files"] = "not committed" if self.exists() else "the directory does not exist"
            else:
                files, entry = parse_listing(listing, self.path)
                rows["files"] = f"{len(files)}, {sum(file.size for file in files.values()):,} bytes"
                metrics = Fields(entry, self.path).mapping("metrics", {})
                rows |= {f"metrics: {name}": value for name, value in metrics.items() if name[:1] != "_"}
            rows |= {f"metadata: {name}": value for name, value in self.get_metadata().items()}
        except StorageError as error:  # showing something is no reason to raise
            rows["files"] = error
        return as_table("Checkpoint", rows)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Checkpoint)
            and self.path == other.path
            and self._storage.filesystem == other._storage.filesystem
        )

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def path(self) -> str:
        """The directory, on its filesystem."""
        return self._storage.root

    @property
    def filesystem(self) -> Any:
        """The filesystem of fsspec or pyarrow that ``path`` is on."""
        return self._storage.filesystem.handle

    def exists(self) -> bool:
        """Whether the directory exists; in a storage without directories, whether it has files."""
        return os.path.isdir(self.path) if self._storage.is_local else bool(self._storage.walk(""))

    @property
    def is_local(self) -> bool:
        """Whether the directory is on this machine's filesystem, or mounted there."""
        return self._storage.is_local

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """A checkpoint of the files in a local directory.

        Args:
            path: the directory; its files are read when the checkpoint is reported.
        """
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A local directory with the checkpoint's files, for the time of a ``with`` block: do not write to it.

        A local checkpoint is not copied, and is kept from being deleted by its run meanwhile. Another one is
        downloaded; processes of one node that want it at the same time share the download, and the last one that is
        done deletes it.

        Raises:
            CheckpointError: the directory does not exist, or a file is not as it was stored.
            StorageError: it cannot be downloaded.
        """
        if self._storage.is_local:
            with hold(self._storage):
                self._require()  # once it is held, it cannot be deleted
                yield self.path
            return
        listing = self._storage.read_bytes(LISTING_FILE)
        if listing is None:
            self._require()
        identity = pickle.dumps(self.filesystem), self.path, listing or sorted(self._storage.walk("").items())
        key = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
        with share_directory("downloads", key, fill=self._fill, wait_s=self._storage.limits.deadline_s) as path:
            yield path

    def to_directory(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> str:
        """Copies the checkpoint's files, or some of them, into a directory of your own.

        Args:
            path: where to; made where it is missing; None makes a temporary directory, which is yours to delete.
            include: patterns such as ``"*.safetensors"`` of the relative paths to copy; one that matches a directory
                stands for everything in it. None for all.
            exclude: patterns of the relative paths to leave out.

        Returns:
            The directory.

        Raises:
            CheckpointError: the directory does not exist, no file matches, or one is not as it was stored.
            StorageError: a file cannot be copied.
        """
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise CheckpointError(f"to_directory({name}=...): expected a list of patterns, got {patterns!r}")
        self._require()
        target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="checkpoint_")
        if not self._fetch(target, include, exclude):
            raise CheckpointError(f"no file of {self.path} matches include={include!r}, exclude={exclude!r}")
        return target

    def verify(self, *, checksums: bool = False) -> None:
        """Makes sure that every file of a committed checkpoint is there, and as long as it was when it was stored.

        Args:
            checksums: also read local files, if the run took checksums (``CheckpointConfig(checksums=True)``).

        Raises:
            CheckpointError: a file is missing or differs, or the checkpoint was never committed.
        """
        listing = self._storage.read_bytes(LISTING_FILE)
        if listing is None:
            raise CheckpointError(f"verify(): expected a committed checkpoint, found no {LISTING_FILE} in {self.path}")
        files, _ = parse_listing(listing, self._storage.path(LISTING_FILE))
        if (damage := self._storage.find_damage("", files, checksums=checksums)) is not None:
            raise CheckpointError(f"the checkpoint {self.path} is damaged: {damage}")

    def get_metadata(self) -> dict[str, Any]:
        """The metadata stored with the checkpoint; empty where there is none.

        Raises:
            CheckpointError: it is no metadata, or of a newer drivetrain.
        """
        data = self._storage.read_bytes(METADATA_FILE)
        where = self._storage.path(METADATA_FILE)
        if data is None:
            return {}
        try:
            found: dict[str, Any] = _decoded(Fields(parse_json(data, where), where).values)
        except (StorageError, ValueError) as error:
            raise CheckpointError(f"{where}: expected a JSON object, got something else: {error}") from error
        if found.keys() != {"version", "metadata"} or not isinstance(found["version"], int):
            return found  # of another tool, which keeps it plain
        check_version(found["version"], where, CheckpointError)
        if not isinstance(found["metadata"], dict):
            raise CheckpointError(
                f"{where}: expected a JSON object as metadata, got {type(found['metadata']).__name__}"
            )
        metadata: dict[str, Any] = found["metadata"]
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata stored with the checkpoint.

        Args:
            metadata: values that JSON knows, or bytes.

        Raises:
            CheckpointError: the directory does not exist, a value is neither, or there is more than can be read back.
        """
        self._require()
        try:
            text = metadata_json({"version": VERSION, "metadata": dict(metadata)})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint metadata: expected values that JSON knows, or bytes: {error}") from error
        data = text.encode()
        limit = size_limit(METADATA_FILE)
        if len(data) > limit or count_values(data) > MAX_VALUES:
            raise CheckpointError(
                f"checkpoint metadata: expected at most {limit:,} bytes of JSON with {MAX_VALUES:,} values, got "
                f"{len(data):,} bytes. Write a file into the checkpoint instead"
            )
        self._storage.write_bytes(METADATA_FILE, data)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds to the metadata stored with the checkpoint; new values win over old ones."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def pin(self) -> None:
        """Keeps the checkpoint whatever the run's :class:`~drivetrain.CheckpointConfig` says, until it is unpinned.

        Works on a directory that is yet to be reported, and on one that is committed.

        Raises:
            CheckpointError: the directory does not exist.
        """
        self._require()
        self._storage.write_bytes(PIN_FILE, b"")

    def unpin(self) -> None:
        """Leaves the checkpoint to the run's retention again, which looks at it with the next commit."""
        self._storage.delete(PIN_FILE)

    def is_pinned(self) -> bool:
        """Whether :meth:`pin` was called, and :meth:`unpin` not since."""
        return self._storage.exists(PIN_FILE)

    def _fill(self, target: str) -> None:
        self._fetch(target)

    def _fetch(
        self, target: str, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> list[str]:
        files = None
        if (listing := self._storage.read_bytes(LISTING_FILE)) is not None:
            files, _ = parse_listing(listing, self._storage.path(LISTING_FILE))
        exclude = [*(exclude or ()), LISTING_FILE, PIN_FILE]
        return self._storage.get_directory("", target, files=files, include=include, exclude=exclude)

    def _require(self) -> None:
        if not self.exists():
            what = "a link without a target" if os.path.islink(self.path) and self.is_local else "none"
            raise CheckpointError(f"a checkpoint: expected a directory that exists, found {what} at {self.path}")


def checkpoint_in(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint in a directory of a run directory.

    Raises:
        StorageError: the name leaves the run directory, or a symbolic link does.
    """
    checkpoint = Checkpoint.__new__(Checkpoint)
    checkpoint._storage = storage.inside(name)
    return checkpoint


def own_files(files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """The files whose content is settled when they are stored; metadata and pins may change later."""
    return {path: facts for path, facts in files.items() if path not in (METADATA_FILE, PIN_FILE, LISTING_FILE)}


def parse_listing(data: bytes, where: str) -> tuple[dict[str, StoredFile], dict[str, Any]]:
    """The files of a committed checkpoint by relative path, and the facts of its commit.

    Raises:
        StorageError: this is no such list, or one of a newer drivetrain.
    """
    listing = Fields(parse_json(data, where), where)
    check_version(listing.integer("version"), where)
    files = {
        require_relative(path, where): _stored_file(path, facts, where)
        for path, facts in listing.mapping("files").items()
    }
    return files, listing.mapping("entry")


def _stored_file(path: str, facts: object, where: str) -> StoredFile:
    match facts:
        case [int(size)] | [int(size), None]:
            return StoredFile(size)
        case [int(size), int(crc32)]:
            return StoredFile(size, crc32)
    raise StorageError(f"{where}: expected the size and the checksum of {path!r}, got something else")


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Metadata as JSON, in which bytes are objects of one entry.

    Raises:
        TypeError: a value is none that JSON knows, and no bytes.
    """
    return json.dumps(metadata, default=_encoded)


def _encoded(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return {_BYTES: base64.b64encode(value).decode()}


def _decoded(value: Any) -> Any:
    """The value with every object that stands for bytes replaced by them."""
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES} and isinstance(value[_BYTES], str):
        return base64.b64decode(value[_BYTES])
    return {name: _decoded(inner) for name, inner in value.items()}
