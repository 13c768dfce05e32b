"""``trainer.pkl``: the stored arguments of a trainer, from which ``restore`` creates a trainer to resume the run."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from drivetrain._base.pickling import dumps
from drivetrain._base.redact import redact
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import RUN_FILE, TRAINER_FILE, VERSION, check_version
from drivetrain._storage.remote import locate
from drivetrain.errors import SerializationError, StorageError

__all__ = ["TrainerFile"]


@dataclass(frozen=True, slots=True)
class TrainerFile:
    """The arguments of a trainer, each pickled separately."""

    parts: Mapping[str, bytes]

    @classmethod
    def of(cls, *, pickled: Mapping[str, bytes], values: Mapping[str, Any]) -> TrainerFile:
        """Return the file of a trainer, without the arguments that cannot be pickled. ``restore`` requires them again.

        Args:
            pickled: arguments that are pickled already, each of them separately. If one of them can no longer be
                loaded, a new value can be passed to ``restore``.
            values: the other arguments.
        """
        parts = dict(pickled)
        for name, value in values.items():
            with contextlib.suppress(Exception):  # a user's object may raise any exception
                parts[name] = dumps(value)
        return cls(parts)

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
            return cls(stored["parts"])
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
        return pickle.dumps({"version": VERSION, "parts": dict(self.parts)})

    def load(self, names: set[str], *, configurations: set[str]) -> dict[str, Any]:
        """Return the stored arguments with the given names.

        Args:
            names: the names of the arguments.
            configurations: the names of configurations. A run must not resume with the default configuration instead
                of its own.

        Raises:
            SerializationError: an argument cannot be loaded in this process, or a configuration was not stored.
        """
        if missing := sorted((names & configurations) - self.parts.keys()):
            raise SerializationError(
                f"[DT-202] restore: expected the stored {missing[0]}, got none, because an object in it, such as a "
                f"callback or a lock, could not be pickled. Pass it again: restore(path, {missing[0]}=...)"
            )
        values: dict[str, Any] = {}
        for name in sorted(names & self.parts.keys()):
            try:
                values[name] = pickle.loads(self.parts[name])
                _complete(values[name])
            except Exception as error:  # a user's object may raise any exception
                raise SerializationError(
                    f"[DT-202] restore: the stored {name} cannot be loaded ({type(error).__name__}: {error}). "
                    f"Pass it again: restore(path, {name}=...)"
                ) from error
        return values


def _complete(value: Any) -> None:
    """Set the fields of a configuration that did not exist in the release that stored it to their default values.

    The first releases stored a configuration as the values of its fields, without their names.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return
    for field in fields(value):
        if hasattr(value, field.name):
            _complete(getattr(value, field.name))
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            object.__setattr__(value, field.name, default)
