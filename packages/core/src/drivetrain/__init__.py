"""drivetrain scales a training function from one process to a cluster.

Importing this module loads almost nothing: each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names
from drivetrain._version import __version__

if TYPE_CHECKING:
    from drivetrain._driver.handle import RunHandle
    from drivetrain._driver.restoring import restore
    from drivetrain._driver.result import Result
    from drivetrain._driver.trainer import DataParallelTrainer
    from drivetrain._hooks.callback import Callback
    from drivetrain._hooks.context import TrainContext
    from drivetrain._plugins.data_config import DataConfig
    from drivetrain._plugins.preparing import prepare
    from drivetrain._storage.checkpoint import Checkpoint
    from drivetrain._wire.events import PreemptionInfo
    from drivetrain._worker.session import (
        get_checkpoint,
        get_context,
        get_dataset_shard,
        get_preemption_info,
        heartbeat,
        report,
        resume_later,
        shared_checkpoint,
    )
    from drivetrain.config import (
        CheckpointConfig,
        CheckpointUploadMode,
        FailureConfig,
        RunConfig,
        ScalingConfig,
        SyncConfig,
    )
    from drivetrain.errors import (
        BackendError,
        CallbackError,
        CheckpointError,
        ConfigurationError,
        DrivetrainError,
        FailureKind,
        PluginBrokenError,
        PluginError,
        PluginNotFoundError,
        RemoteError,
        ResourceError,
        RunCancelledError,
        RunExistsError,
        RunInUseError,
        SerializationError,
        SessionError,
        StorageError,
        TrainingFailedError,
        WaitTimeoutError,
        WorkerDiedError,
    )
else:
    _SOURCES = {
        "drivetrain._driver.handle": "RunHandle",
        "drivetrain._driver.restoring": "restore",
        "drivetrain._driver.result": "Result",
        "drivetrain._driver.trainer": "DataParallelTrainer",
        "drivetrain._hooks.callback": "Callback",
        "drivetrain._hooks.context": "TrainContext",
        "drivetrain._plugins.data_config": "DataConfig",
        "drivetrain._plugins.preparing": "prepare",
        "drivetrain._storage.checkpoint": "Checkpoint",
        "drivetrain._wire.events": "PreemptionInfo",
        "drivetrain._worker.session": (
            "get_checkpoint get_context get_dataset_shard get_preemption_info heartbeat report resume_later "
            "shared_checkpoint"
        ),
        "drivetrain.config": "CheckpointConfig CheckpointUploadMode FailureConfig RunConfig ScalingConfig SyncConfig",
        "drivetrain.errors": (
            "BackendError CallbackError CheckpointError ConfigurationError DrivetrainError FailureKind "
            "PluginBrokenError PluginError PluginNotFoundError RemoteError ResourceError "
            "RunCancelledError RunExistsError RunInUseError SerializationError SessionError "
            "StorageError TrainingFailedError WaitTimeoutError WorkerDiedError"
        ),
    }
    # A script that imports this name needs workers.
    _THEN = {"ScalingConfig": "drivetrain._runtimes.early:fork_server_at_head"}
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES, "config errors loggers plugin runs", then=_THEN)

__all__ = [
    "BackendError",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointUploadMode",
    "ConfigurationError",
    "DataConfig",
    "DataParallelTrainer",
    "DrivetrainError",
    "FailureConfig",
    "FailureKind",
    "PluginBrokenError",
    "PluginError",
    "PluginNotFoundError",
    "PreemptionInfo",
    "RemoteError",
    "ResourceError",
    "Result",
    "RunCancelledError",
    "RunConfig",
    "RunExistsError",
    "RunHandle",
    "RunInUseError",
    "ScalingConfig",
    "SerializationError",
    "SessionError",
    "StorageError",
    "SyncConfig",
    "TrainContext",
    "TrainingFailedError",
    "WaitTimeoutError",
    "WorkerDiedError",
    "__version__",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "heartbeat",
    "prepare",
    "report",
    "restore",
    "resume_later",
    "shared_checkpoint",
]
