"""``trainer.pkl``: the stored arguments of a trainer, from which ``restore`` creates a trainer to resume the run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drivetrain._base.pickling import dumps
from drivetrain._base.redact import redact
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import RUN_FILE, TRAINER_FILE, VERSION, check_version
from drivetrain._storage.remote import locate
from drivetrain.config import RunConfig
from drivetrain.errors import SerializationError, StorageError

__all__ = ["TrainerFile"]


_NOT_STORED = ("datasets", "dataset_config", "resume_from_checkpoint")
"""The arguments that are passed again when a run is restored."""


@dataclass(frozen=True, slots=True)
class TrainerFile:
    """The arguments of a trainer's constructor, each pickled separately.

    Attributes:
        parts: the pickled arguments by name. If one of them can no longer be loaded, another value can be passed.
        missing: the names of the arguments that could not be pickled.
    """

    parts: Mapping[str, bytes]
    missing: Sequence[str]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> TrainerFile:
        """Return the file of a trainer.

        A filesystem in the configuration is not stored, because it may contain credentials.

        Args:
            arguments: the arguments that were passed to the constructor, by name.
        """
        parts, missing = {}, []
        for name, value in arguments.items():
            if name in _NOT_STORED:
                continue
            try:
                parts[name] = dumps(replace(value, storage_filesystem=None) if isinstance(value, RunConfig) else value)
            except Exception:  # a user's object may raise any exception
                missing.append(name)
        return cls(parts, missing)

    @classmethod
    def read(cls, path: str | os.PathLike[str], filesystem: Any | None) -> TrainerFile:
        """Read the file from a run directory.

        Raises:
            StorageError: the file does not exist, or cannot be read.
        """
        storage = Storage(*locate(path, filesystem, what="restore(path)"))
        data = storage.read_bytes(TRAINER_FILE)
        if data is None or not storage.exists(RUN_FILE):
            raise StorageError(
                f"[DT-707] restore: expected a run directory with {RUN_FILE} and {TRAINER_FILE}, got "
                f"{redact(os.fspath(path))}. Check with can_restore(path)"
            )
        try:
            stored = pickle.loads(data)
            check_version(stored["version"], storage.path(TRAINER_FILE))
            return cls(stored["parts"], stored["missing"])
        except StorageError:
            raise
        except Exception as error:  # a damaged pickle may raise any exception
            raise StorageError(
                f"[DT-707] {storage.path(TRAINER_FILE)} cannot be read ({error!r}). Instead of restore(), create "
                "the trainer again with its original arguments and run_config=RunConfig(resume=<path of the run "
                "directory>)"
            ) from error

    @staticmethod
    def exists(path: str | os.PathLike[str], filesystem: Any | None) -> bool:
        """Return True if a run directory contains the file that :meth:`read` reads."""
        storage = Storage(*locate(path, filesystem, what="can_restore(path)"))
        return storage.exists(RUN_FILE) and storage.exists(TRAINER_FILE)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return pickle.dumps({"version": VERSION, "parts": dict(self.parts), "missing": list(self.missing)})

    def load(self, replaced: Collection[str]) -> dict[str, Any]:
        """Return the stored arguments by name, except for those that are replaced.

        Raises:
            SerializationError: an argument cannot be loaded in this process, or was not stored.
        """
        if missing := sorted(set(self.missing) - set(replaced)):
            raise SerializationError(
                f"[DT-202] restore: expected the stored {missing[0]}, got none, because an object in it, such as a "
                f"callback or a lock, could not be pickled. Pass it again: restore(path, {missing[0]}=...)"
            )
        values: dict[str, Any] = {}
        for name in sorted(self.parts.keys() - set(replaced)):
            try:
                values[name] = pickle.loads(self.parts[name])
            except Exception as error:  # a user's object may raise any exception
                raise SerializationError(
                    f"[DT-202] restore: the stored {name} cannot be loaded ({type(error).__name__}: {error}). "
                    f"Pass it again: restore(path, {name}=...)"
                ) from error
        return values
