"""What a worker is given to run the train function once."""

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
    """What a run's configuration says about its workers' side.

    Attributes:
        checkpoints: how checkpoints are stored.
        sync: how artifacts are.
        start: how many drivers have worked on the run, this one included.
        chdir: run the function in its directory for artifacts.
    """

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    start: int | None = None
    chdir: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """Everything one rank needs to run the train function once.

    Attributes:
        function: the pickled pair of train function and config.
        backend: sets the framework up around it.
        rendezvous: this rank's mapping for the backend.
        context: the facts that the function can ask for.
        checkpoint: what to resume from.
        last_report: the numbers that the first report follows.
        options: what the run's configuration says about the worker's side.
        datasets: the rank's shards, by name.
        wants_value: what the function returns is told.
    """

    function: bytes
    backend: Backend
    rendezvous: Mapping[str, str]
    context: TrainContext
    checkpoint: Checkpoint | None
    last_report: ReportNumber
    options: SessionOptions = field(default_factory=SessionOptions)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    wants_value: bool = True
