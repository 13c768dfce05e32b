"""The exceptions of drivetrain.

Every message states the expected and the actual value or state, and how to fix the problem. Every exception can be
pickled, because many exceptions are raised in a worker process and shown in the driver.

    DrivetrainError
    ├── ConfigurationError          an invalid value, rejected before anything starts (also a ValueError)
    ├── SerializationError          a function, config or value that cannot be sent to another process
    ├── PluginError                 a plugin that cannot be used
    │   ├── PluginNotFoundError     no installed distribution provides a plugin with that name
    │   └── PluginBrokenError       a distribution provides the plugin, but loading the plugin failed
    ├── SessionError                report() or a similar function called outside a worker, or with invalid arguments
    ├── StorageError                the run directory cannot be read or written
    │   ├── RunExistsError          a run with that name exists already
    │   ├── RunInUseError           another driver is working on the run
    │   └── CheckpointError         a checkpoint that is missing, empty, damaged, or reported twice with different files
    ├── ResourceError               the run needs more CPUs, GPUs or nodes than exist
    ├── WaitTimeoutError            a deadline passed; the message names the awaited event and the missing ranks
    ├── WorkerDiedError             a worker process exited, or its node was lost, before the train function returned
    ├── BackendError                a backend failed on the driver
    ├── CallbackError               a callback raised an exception, which is ``__cause__``
    ├── RunCancelledError           another thread cancelled the run
    ├── RemoteError                 replaces a worker's exception that could not be pickled
    └── TrainingFailedError         training failed; fit() raises this error, and ``__cause__`` is the root cause
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BackendError",
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


_CODE = re.compile(r"\[(DT-\d{3})\] ")


class FailureKind(enum.Enum):
    """The category of a failure. Whether drivetrain retries depends on it."""

    USER_ERROR = "user error"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    HANG = "hang"
    OUT_OF_MEMORY = "out of memory"
    STORAGE = "storage"


class DrivetrainError(Exception):
    """Base class of the exceptions that drivetrain defines.

    Example:
        >>> import drivetrain
        >>> try:
        ...     drivetrain.report({"loss": 1.0})
        ... except drivetrain.DrivetrainError as error:
        ...     print(error.code)
        DT-801
    """

    @property
    def code(self) -> str | None:
        """The error code in the message, such as ``DT-801``, or None. ``drivetrain explain`` describes each code."""
        match = _CODE.search(str(self).partition("\n")[0])
        return None if match is None else match[1]


class ConfigurationError(DrivetrainError, ValueError):
    """A value is invalid. It is rejected before anything is started."""


class SerializationError(DrivetrainError):
    """An object cannot be pickled, so it cannot be sent to another process."""


class PluginError(DrivetrainError):
    """A plugin cannot be used."""


class PluginNotFoundError(PluginError):
    """No installed distribution provides a plugin with that name."""


class PluginBrokenError(PluginError):
    """A distribution provides the plugin, but loading the plugin failed; ``__cause__`` is the original exception."""


class SessionError(DrivetrainError):
    """A function for workers, such as ``report()``, was called outside a worker or with an invalid argument."""


class StorageError(DrivetrainError):
    """The run directory cannot be read or written."""


class RunExistsError(StorageError):
    """The storage path already contains a run with that name, and ``RunConfig(resume=...)`` does not resume it."""


class RunInUseError(StorageError):
    """Another driver is using the run; the message names that driver."""


class CheckpointError(StorageError):
    """A checkpoint is missing, empty or damaged, or its parts do not fit together."""


class ResourceError(DrivetrainError):
    """The run needs more CPUs, GPUs or nodes than exist."""


class WaitTimeoutError(DrivetrainError):
    """The deadline of a wait passed.

    Attributes:
        ranks: the ranks that were still awaited, in ascending order; empty if the wait was not for ranks.
    """

    def __init__(self, message: str = "", *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerDiedError(DrivetrainError):
    """A worker process exited, or its node was lost, before the train function returned.

    Attributes:
        rank: the world rank of the worker; None if it had no rank yet.
        exit_code: the exit code of the process; the negative signal number if a signal killed it; None if unknown.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class CallbackError(DrivetrainError):
    """A callback raised an exception, which is ``__cause__``. The message names the callback and the hook."""


class BackendError(DrivetrainError):
    """A backend failed on the driver; ``__cause__`` is its exception, if any. The message names backend and method."""


class RemoteError(DrivetrainError):
    """Replaces a worker's exception that could not be pickled. The message has its type, text and traceback."""


class RunCancelledError(DrivetrainError):
    """Another thread of the driver cancelled the run. It can be resumed from its latest checkpoint."""


class TrainingFailedError(DrivetrainError):
    """Training failed and no retries were left. ``__cause__`` is the root cause, with its traceback from the worker.

    Attributes:
        kind: the category of the root cause.
        rank: the world rank that failed; None if the failure was not on a single rank.
        worker_failures: the exceptions of all ranks that failed in the last attempt before it ended, by world rank.
            Empty for an error that was read from a run directory.
    """

    def __init__(
        self,
        message: str = "",
        *,
        kind: FailureKind = FailureKind.USER_ERROR,
        rank: int | None = None,
        worker_failures: Mapping[int, BaseException | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank
        self.worker_failures = dict(worker_failures or {})

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle ``__cause__`` too. By default, pickling drops it, and Ray and process pools pickle exceptions."""
        return type(self), self.args, {**vars(self), "__cause__": self.__cause__}
