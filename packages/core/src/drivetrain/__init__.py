"""drivetrain scales a training function from one process to a cluster."""

from drivetrain._version import __version__
from drivetrain.backend import Backend, BackendConfig, WorkerGroup
from drivetrain.callback import Callback, Report
from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoints import CommittedCheckpoint
from drivetrain.config import (
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)
from drivetrain.context import Run, TrainContext, WorkerInfo
from drivetrain.data import DataConfig, DatasetShard
from drivetrain.errors import (
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
from drivetrain.failure import Failure
from drivetrain.handle import RunHandle
from drivetrain.interactive.callbacks import TrainingCallback
from drivetrain.interactive.dicts import load_checkpoint, save_checkpoint
from drivetrain.interactive.iterator import TrainingIterator
from drivetrain.interactive.ranks import local_rank, world_rank, world_size
from drivetrain.interactive.trainer import CheckpointStrategy, Trainer
from drivetrain.policy import FailurePolicy
from drivetrain.preemption import PreemptionInfo
from drivetrain.result import Result
from drivetrain.session import get_checkpoint, get_context, get_dataset_shard, get_preemption_info, report
from drivetrain.trainer import DataParallelTrainer

__all__ = [
    "Backend",
    "BackendConfig",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointStrategy",
    "CheckpointUploadMode",
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
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]
