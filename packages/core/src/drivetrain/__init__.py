"""drivetrain scales a training function from one process to a cluster.

Importing this module loads almost nothing: each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names
from drivetrain._version import __version__

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._driver.handle import RunHandle
    from drivetrain._driver.restoring import restore
    from drivetrain._driver.result import Result
    from drivetrain._driver.trainer import DataParallelTrainer
    from drivetrain._hooks.backend import Backend, BackendConfig, WorkerGroup
    from drivetrain._hooks.callback import Callback, Report
    from drivetrain._hooks.context import Run, TrainContext, WorkerInfo
    from drivetrain._hooks.data_config import DataConfig
    from drivetrain._hooks.dataset import DatasetShard
    from drivetrain._hooks.policy import FailurePolicy
    from drivetrain._hooks.preparing import prepare
    from drivetrain._runtimes.command.runtime import CommandRuntime
    from drivetrain._storage.checkpoint import Checkpoint
    from drivetrain._storage.committed import CommittedCheckpoint
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
    from drivetrain.interactive.callbacks import TrainingCallback
    from drivetrain.interactive.dicts import load_checkpoint, save_checkpoint
    from drivetrain.interactive.iterator import TrainingIterator
    from drivetrain.interactive.ranks import local_rank, world_rank, world_size
    from drivetrain.interactive.trainer import CheckpointStrategy, Trainer
else:
    _SOURCES = {
        "drivetrain._base.failure": "Failure",
        "drivetrain._driver.handle": "RunHandle",
        "drivetrain._driver.restoring": "restore",
        "drivetrain._driver.result": "Result",
        "drivetrain._driver.trainer": "DataParallelTrainer",
        "drivetrain._hooks.backend": "Backend BackendConfig WorkerGroup",
        "drivetrain._hooks.callback": "Callback Report",
        "drivetrain._hooks.context": "Run TrainContext WorkerInfo",
        "drivetrain._hooks.data_config": "DataConfig",
        "drivetrain._hooks.dataset": "DatasetShard",
        "drivetrain._hooks.policy": "FailurePolicy",
        "drivetrain._hooks.preparing": "prepare",
        "drivetrain._runtimes.command.runtime": "CommandRuntime",
        "drivetrain._storage.checkpoint": "Checkpoint",
        "drivetrain._storage.committed": "CommittedCheckpoint",
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
        "drivetrain.interactive.callbacks": "TrainingCallback",
        "drivetrain.interactive.dicts": "load_checkpoint save_checkpoint",
        "drivetrain.interactive.iterator": "TrainingIterator",
        "drivetrain.interactive.ranks": "local_rank world_rank world_size",
        "drivetrain.interactive.trainer": "CheckpointStrategy Trainer",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES, "config errors interactive loggers plugin testing")

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendError",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointStrategy",
    "CheckpointUploadMode",
    "CommandRuntime",
    "CommittedCheckpoint",
    "ConfigurationError",
    "DataConfig",
    "DataParallelTrainer",
    "DatasetShard",
    "DrivetrainError",
    "Failure",
    "FailureConfig",
    "FailureKind",
    "FailurePolicy",
    "PluginBrokenError",
    "PluginError",
    "PluginNotFoundError",
    "PreemptionInfo",
    "RemoteError",
    "Report",
    "ResourceError",
    "Result",
    "Run",
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
    "Trainer",
    "TrainingCallback",
    "TrainingFailedError",
    "TrainingIterator",
    "WaitTimeoutError",
    "WorkerDiedError",
    "WorkerGroup",
    "WorkerInfo",
    "__version__",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "heartbeat",
    "load_checkpoint",
    "local_rank",
    "prepare",
    "report",
    "restore",
    "resume_later",
    "save_checkpoint",
    "shared_checkpoint",
    "world_rank",
    "world_size",
]
