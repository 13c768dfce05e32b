"""The task of a worker, which is to run the train function once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain._base.mesh import DataPosition
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import TrainContext
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._wire.events import ReportNumber
from drivetrain.config import SyncConfig

__all__ = ["PackedFunction", "SessionOptions", "TrainTask"]

PackedFunction = bytes | tuple[Callable[..., Any], Any]
"""A train function and its config. In the driver's process, nothing is pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """The parts of a run's configuration that its workers use.

    Attributes:
        sync: settings for uploading artifacts.
        driver_count: number of drivers that have worked on the run so far, including the current one; None to skip the
            check that no other driver has taken over the run.
        chdir: True to run the train function with the directory for artifacts as its working directory.
        progress_interval_s: see :class:`~drivetrain._wire.commands.Train`.
    """

    sync: SyncConfig = field(default_factory=SyncConfig)
    driver_count: int | None = None
    chdir: bool = False
    progress_interval_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """Everything that a rank needs to run the train function once.

    Attributes:
        function: the train function and its config.
        backend: the backend, which sets up the framework.
        rendezvous: this rank's mapping from :meth:`Backend.rendezvous() <drivetrain.plugin.Backend.rendezvous>`.
        context: the return value of ``get_context()``.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        last_report: the numbers that directly precede those of the task's first report.
        options: the parts of the run's configuration that the worker uses.
        datasets: a mapping from the name of a dataset to the rank's shard of that dataset.
        data_position: the position of the rank in the datasets that are split; None if the user's own code splits them.
        needs_value: True if the driver needs the function's return value.
    """

    function: PackedFunction
    backend: Backend
    rendezvous: Mapping[str, str]
    context: TrainContext
    checkpoint: Checkpoint | None
    last_report: ReportNumber
    options: SessionOptions = field(default_factory=SessionOptions)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    data_position: DataPosition | None = None
    needs_value: bool = True
