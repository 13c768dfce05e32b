"""The task of a worker: to run the train function once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import TrainContext
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._wire.events import ReportNumber
from drivetrain.config import CheckpointConfig, SyncConfig

__all__ = ["SessionOptions", "TrainTask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """The parts of a run's configuration that its workers use.

    Attributes:
        checkpoints: settings for storing checkpoints.
        sync: settings for uploading artifacts.
        start: number of drivers that have worked on the run so far, including this one.
        chdir: True to run the function with its artifacts directory as the working directory.
    """

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    start: int | None = None
    chdir: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """Everything that a rank needs to run the train function once.

    Attributes:
        function: the pickled pair of train function and config.
        backend: sets up the framework.
        rendezvous: this rank's mapping for the backend.
        context: the return value of ``get_context()``.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        last_report: the number after which the first report is numbered.
        options: the parts of the run's configuration that the worker uses.
        datasets: the rank's shards, by name.
        needs_value: True if the driver needs the function's return value.
    """

    function: bytes
    backend: Backend
    rendezvous: Mapping[str, str]
    context: TrainContext
    checkpoint: Checkpoint | None
    last_report: ReportNumber
    options: SessionOptions = field(default_factory=SessionOptions)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    needs_value: bool = True
