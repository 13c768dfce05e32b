"""A checkpoint: a directory of files on some filesystem, with metadata."""

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
    run_file,
)
from drivetrain._storage.node import share_directory
from drivetrain._storage.reading import MAX_VALUES, Fields, count_values, parse_json
from drivetrain._storage.remote import locate
from drivetrain.errors import CheckpointError, StorageError

__all__ = ["Checkpoint", "checkpoint_in", "immutable_files", "parse_listing"]

_BYTES = "__bytes__"
_MAX_FILE_BYTES = (1 << 63) - 1


class Checkpoint:
    """A directory with everything that a train function needs to continue.

    A checkpoint is a reference, not a copy: creating one reads no files. Reporting a checkpoint stores its files in the
    run directory, and the commit makes them durable. The checkpoints of a run, for example ``Result.checkpoint``, refer
    to directories in the run directory.

    Args:
        path: a local directory, a URI such as ``s3://bucket/run/checkpoint_000003``, or a path on ``filesystem``.
        filesystem: the filesystem of pyarrow or fsspec that ``path`` is on; None to select the filesystem by the path.

    Attributes:
        path: the directory, on its filesystem.

    Raises:
        ConfigurationError: the path is on a storage system that cannot be used.

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
        except StorageError as error:  # the display in a notebook must not raise
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
        """Return True if the directory exists. On remote storage, return True if the directory contains files."""
        return os.path.isdir(self.path) if self._storage.is_local else bool(self._storage.walk(""))

    @property
    def is_local(self) -> bool:
        """Whether the directory is on this machine's filesystem, or mounted there."""
        return self._storage.is_local

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Create a checkpoint of the files in a local directory.

        Args:
            path: the directory. Its files are read when the checkpoint is reported, not before.
        """
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Provide the checkpoint's files in a local directory during a ``with`` block. Do not write to it.

        A local checkpoint is not copied, and its run does not delete it during the block. A remote checkpoint is
        downloaded. Processes of one node that use the same checkpoint at the same time share one download. The last of
        these processes deletes the downloaded files.

        Raises:
            CheckpointError: the directory does not exist, or a file is missing or damaged.
            StorageError: the checkpoint cannot be downloaded, or another process has locked it for a minute.
        """
        if self._storage.is_local:
            with hold(self._storage):
                self._require()  # after locking: from now on, the directory cannot be deleted
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
        """Copy the checkpoint's files, or some of them, into a directory that you choose.

        The run does not delete a local checkpoint while its files are copied.

        Args:
            path: the target directory, which is created if it is missing. None creates a temporary directory, which is
                not deleted automatically.
            include: patterns such as ``"*.safetensors"`` of the relative paths to copy. A pattern that matches a
                directory selects all files in it. None selects all files.
            exclude: patterns of the relative paths to leave out.

        Returns:
            The target directory.

        Raises:
            CheckpointError: the checkpoint's directory does not exist, no file matches the patterns, or a file is
                missing or damaged.
            StorageError: a file cannot be copied.
        """
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise CheckpointError(f"to_directory({name}=...): expected a list of patterns, got {patterns!r}")
        with hold(self._storage) if self._storage.is_local else contextlib.nullcontext():
            self._require()
            target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="checkpoint_")
            if not self._fetch(target, include, exclude):
                raise CheckpointError(f"no file of {self.path} matches include={include!r}, exclude={exclude!r}")
        return target

    def verify(self, *, checksums: bool = False) -> None:
        """Check that every file of a committed checkpoint exists and has the size that the commit recorded.

        Args:
            checksums: also read local files and compare their checksums, if the run recorded checksums
                (``CheckpointConfig(checksums=True)``).

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint was never committed.
        """
        listing = self._storage.read_bytes(LISTING_FILE)
        if listing is None:
            raise CheckpointError(
                f"[DT-412] verify(): expected a committed checkpoint, got {self.path} without a {LISTING_FILE}"
            )
        files, _ = parse_listing(listing, self._storage.path(LISTING_FILE))
        if (damage := self._storage.find_damage("", files, checksums=checksums)) is not None:
            raise CheckpointError(f"[DT-409] the checkpoint {self.path} is damaged: {damage}")

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata stored with the checkpoint; an empty dict if there is none.

        Raises:
            CheckpointError: the metadata is damaged, or a newer drivetrain wrote it.
        """
        data = self._storage.read_bytes(METADATA_FILE)
        where = self._storage.path(METADATA_FILE)
        if data is None:
            return {}
        try:
            found: dict[str, Any] = _decoded(Fields(parse_json(data, where), where).values)
        except (StorageError, ValueError) as error:
            raise CheckpointError(f"[DT-413] {where}: expected a JSON object, got something else: {error}") from error
        if found.keys() != {"version", "metadata"} or not isinstance(found["version"], int):
            return found  # written by another tool, without a version
        check_version(found["version"], where, CheckpointError)
        if not isinstance(found["metadata"], dict):
            raise CheckpointError(
                f"[DT-413] {where}: expected a JSON object as metadata, got {type(found['metadata']).__name__}"
            )
        metadata: dict[str, Any] = found["metadata"]
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata stored with the checkpoint.

        Args:
            metadata: values that JSON supports, or bytes.

        Raises:
            CheckpointError: the directory does not exist, a value is not supported, or the metadata is too large.
        """
        self._require()
        try:
            text = metadata_json({"version": VERSION, "metadata": dict(metadata)})
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"[DT-107] checkpoint metadata: expected values that JSON supports, or bytes: {error}"
            ) from error
        data = text.encode()
        limit = run_file(METADATA_FILE).limit
        values = count_values(data)
        if len(data) > limit or values > MAX_VALUES:
            raise CheckpointError(
                f"[DT-107] checkpoint metadata: expected at most {limit:,} bytes of JSON with {MAX_VALUES:,} values, "
                f"got {len(data):,} bytes with {values:,} values. Write a file into the checkpoint instead"
            )
        self._storage.write_bytes(METADATA_FILE, data)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add values to the metadata stored with the checkpoint. They replace existing values with the same names."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def pin(self) -> None:
        """Keep the checkpoint until it is unpinned, even if :class:`~drivetrain.CheckpointConfig` would drop it.

        This works on a directory before it is reported, and on a committed checkpoint.

        Raises:
            CheckpointError: the directory does not exist.
        """
        self._require()
        self._storage.write_bytes(PIN_FILE, b"")

    def unpin(self) -> None:
        """Make the checkpoint subject to the run's retention again, starting with the next commit."""
        self._storage.delete(PIN_FILE)

    def is_pinned(self) -> bool:
        """Return True if the checkpoint is pinned."""
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
            is_link = self._storage.is_local and os.path.islink(self.path)
            what = "is a symbolic link without a target" if is_link else "does not exist"
            raise CheckpointError(f"[DT-408] {self.path}: expected the checkpoint's directory, which {what}")


def checkpoint_in(storage: Storage, name: str) -> Checkpoint:
    """Return the checkpoint in the directory ``name`` of a run directory.

    Raises:
        StorageError: the name leads out of the run directory, or contains a symbolic link.
    """
    checkpoint = Checkpoint.__new__(Checkpoint)
    checkpoint._storage = storage.inside(name)
    return checkpoint


def immutable_files(files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """Return the files that never change once they are stored, without the metadata, the pin and the listing."""
    return {path: facts for path, facts in files.items() if path not in (METADATA_FILE, PIN_FILE, LISTING_FILE)}


def parse_listing(data: bytes, where: str) -> tuple[dict[str, StoredFile], dict[str, Any]]:
    """Parse the listing of a committed checkpoint.

    Returns:
        The files of the checkpoint by relative path, and the fields of its manifest entry.

    Raises:
        StorageError: the listing is damaged, or a newer drivetrain wrote it.
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
        case [int(size)] | [int(size), None] if 0 <= size <= _MAX_FILE_BYTES:
            return StoredFile(size)
        case [int(size), int(crc32)] if 0 <= size <= _MAX_FILE_BYTES:
            return StoredFile(size, crc32)
    raise StorageError(f"{where}: expected the size and the checksum of {path!r}, got something else")


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Encode metadata as JSON. Bytes become an object with the single key ``__bytes__`` and the bytes in base64.

    Raises:
        TypeError: a value is neither supported by JSON nor bytes.
    """
    return json.dumps(metadata, default=_encoded)


def _encoded(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return {_BYTES: base64.b64encode(value).decode()}


def _decoded(value: Any) -> Any:
    """Return a parsed JSON value in which each object that represents bytes is replaced by these bytes."""
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES} and isinstance(value[_BYTES], str):
        return base64.b64decode(value[_BYTES])
    return {name: _decoded(inner) for name, inner in value.items()}
