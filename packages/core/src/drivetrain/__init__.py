"""drivetrain scales a training function from one process to a cluster."""

from drivetrain._version import __version__
from drivetrain.backend import Backend, BackendConfig, WorkerGroup
from drivetrain.callback import Callback, Report
from drivetrain.checkpoint import Checkpoint
from drivetrain.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, SyncConfig
from drivetrain.context import TrainContext, WorkerInfo
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
    RunExistsError,
    SerializationError,
    SessionError,
    StorageError,
    TrainingFailedError,
    WaitTimeoutError,
    WorkerDiedError,
)
from drivetrain.result import Result
from drivetrain.session import get_checkpoint, get_context, report
from drivetrain.trainer import DataParallelTrainer

__all__ = [
    "Backend",
    "BackendConfig",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigurationError",
    "DataParallelTrainer",
    "DrivetrainError",
    "FailureConfig",
    "FailureKind",
    "PluginBrokenError",
    "PluginError",
    "PluginNotFoundError",
    "RemoteError",
    "Report",
    "ResourceError",
    "Result",
    "RunConfig",
    "RunExistsError",
    "ScalingConfig",
    "SerializationError",
    "SessionError",
    "StorageError",
    "SyncConfig",
    "TrainContext",
    "TrainingFailedError",
    "WaitTimeoutError",
    "WorkerDiedError",
    "WorkerGroup",
    "WorkerInfo",
    "__version__",
    "get_checkpoint",
    "get_context",
    "report",
]
