"""The exceptions of drivetrain.

Every message says what was wanted, what was found and what to do. Every exception survives pickling, because
many of them are raised in a worker process and shown in the driver.

    DrivetrainError
    ├── ConfigurationError          a value that was refused before anything started (also a ValueError)
    ├── SerializationError          a function, config or value that cannot cross a process boundary
    ├── PluginError                 a plugin that cannot be used
    │   ├── PluginNotFoundError     no installed distribution provides the name
    │   └── PluginBrokenError       a distribution provides the name, and loading it failed
    ├── SessionError                report() and its kin called where, or how, they cannot work
    ├── StorageError                the run directory cannot be read or written
    │   ├── RunExistsError          a run of that name is already there
    │   ├── RunInUseError           another driver is working on the run
    │   └── CheckpointError         a checkpoint that is missing, empty, damaged, or reported twice with different files
    ├── ResourceError               more CPUs, GPUs or nodes asked for than exist
    ├── WaitTimeoutError            a bounded wait expired; names what was waited for, and which ranks are missing
    ├── WorkerDiedError             a worker process or its node ended before its train function returned
    ├── CallbackError               a callback raised; the cause is its exception
    ├── RunCancelledError           another thread has ended the run
    ├── RemoteError                 stands in for a worker's exception that could not be pickled
    └── TrainingFailedError         what fit() raises; ``__cause__`` is the root cause
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CallbackError",
    "CheckpointError",
    "ConfigurationError",
    "DrivetrainError",
    "FailureKind",
    "PluginBrokenError",
    "PluginError",
    "PluginNotFoundError",
    "RemoteError",
    "ResourceError",
    "RunCancelledError",
    "RunExistsError",
    "RunInUseError",
    "SerializationError",
    "SessionError",
    "StorageError",
    "TrainingFailedError",
    "WaitTimeoutError",
    "WorkerDiedError",
]


class FailureKind(enum.Enum):
    """What a failure is, which decides whether a retry can help."""

    USER_ERROR = "user error"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    HANG = "hang"
    OUT_OF_MEMORY = "out of memory"
    STORAGE = "storage"


class DrivetrainError(Exception):
    """Base of every exception that drivetrain raises on its own behalf."""


class ConfigurationError(DrivetrainError, ValueError):
    """A value was refused before anything was started."""


class SerializationError(DrivetrainError):
    """An object cannot be pickled, and so cannot cross a process boundary."""


class PluginError(DrivetrainError):
    """A plugin cannot be used."""


class PluginNotFoundError(PluginError):
    """No installed distribution provides a plugin of that name."""


class PluginBrokenError(PluginError):
    """A distribution provides the plugin, but loading it failed; the cause is chained."""


class SessionError(DrivetrainError):
    """A worker-side function was called outside a worker, or with something it cannot take."""


class StorageError(DrivetrainError):
    """The run directory cannot be read or written."""


class RunExistsError(StorageError):
    """A run of that name is already in the storage path, and the run was not asked to resume."""


class RunInUseError(StorageError):
    """Another driver is working on the run; the message says which."""


class CheckpointError(StorageError):
    """A checkpoint is missing, empty, damaged, or reported by two ranks with different content."""


class ResourceError(DrivetrainError):
    """More was asked for than exists."""


class WaitTimeoutError(DrivetrainError):
    """A bounded wait expired.

    Attributes:
        ranks: the ranks that were waited for and did not come, in order.
    """

    def __init__(self, message: str = "", *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerDiedError(DrivetrainError):
    """A worker process, or the node that ran it, ended before its train function returned.

    Attributes:
        rank: the world rank of the worker, or None where it had none yet.
        exit_code: the process's exit status; negative is the number of the signal that ended it; None if unknown.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class CallbackError(DrivetrainError):
    """A callback raised. The message names the callback and the hook; ``__cause__`` is its exception."""


class RemoteError(DrivetrainError):
    """Stands in for a worker's exception that could not be pickled; the message holds its type, text and traceback."""


class RunCancelledError(DrivetrainError):
    """The run was cancelled by another thread of its driver; it can be resumed from its latest checkpoint."""


class TrainingFailedError(DrivetrainError):
    """Training failed and no retry was left. ``__cause__`` is the root cause, with its traceback from the worker.

    Attributes:
        kind: the class of the root cause.
        rank: the world rank it happened on, or None where it was no single rank's.
    """

    def __init__(
        self, message: str = "", *, kind: FailureKind = FailureKind.USER_ERROR, rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        """Keeps the cause through pickling, which Python would lose: Ray and process pools hand errors on so."""
        return type(self), self.args, {**vars(self), "__cause__": self.__cause__}
