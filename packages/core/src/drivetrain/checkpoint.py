"""A checkpoint: a directory of files, with metadata beside them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import CheckpointError

__all__ = ["METADATA_FILE", "Checkpoint"]

METADATA_FILE = ".metadata.json"


class Checkpoint:
    """A directory that holds whatever a train function needs to continue.

    A checkpoint is a reference, not a copy: making one reads nothing. It becomes durable when it is reported
    and committed, and then points to its place in the run directory.

    Attributes:
        path: the directory.

    Example:
        >>> import tempfile, pathlib
        >>> directory = tempfile.mkdtemp()
        >>> _ = pathlib.Path(directory, "epoch.txt").write_text("3")
        >>> with Checkpoint.from_directory(directory).as_directory() as path:
        ...     pathlib.Path(path, "epoch.txt").read_text()
        '3'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem that ``path`` is on."""
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """A checkpoint of the files in a local directory.

        Args:
            path: the directory; its files are read when the checkpoint is reported.
        """
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A local directory with the checkpoint's files, for the time of a ``with`` block.

        It is the checkpoint itself where that is local: do not write to it.

        Raises:
            CheckpointError: the directory does not exist.
        """
        self._require()
        yield self.path

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies the checkpoint's files into a directory of your own.

        Args:
            path: where to; made where it is missing; None makes a temporary directory, which is yours to delete.

        Returns:
            The directory.

        Raises:
            CheckpointError: the checkpoint's directory does not exist.
        """
        self._require()
        target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="checkpoint_")
        shutil.copytree(self.path, target, dirs_exist_ok=True)
        return target

    def get_metadata(self) -> dict[str, Any]:
        """The metadata stored with the checkpoint; empty where there is none."""
        file = Path(self.path, METADATA_FILE)
        try:
            metadata: dict[str, Any] = json.loads(file.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise CheckpointError(f"{file} wants a JSON object, found something else: {error}") from error
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata stored with the checkpoint.

        Args:
            metadata: what can be written as JSON.

        Raises:
            CheckpointError: the directory does not exist, or a value is none that JSON knows.
        """
        self._require()
        try:
            text = json.dumps(dict(metadata))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint metadata wants values that JSON knows: {error}") from error
        file = Path(self.path, METADATA_FILE)
        draft = file.with_name(f"{METADATA_FILE}.{os.getpid()}")
        draft.write_text(text)
        draft.replace(file)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds to the metadata stored with the checkpoint; new values win over old ones."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def _require(self) -> None:
        if not os.path.isdir(self.path):
            raise CheckpointError(f"a checkpoint wants a directory that exists, found none at {self.path}")
