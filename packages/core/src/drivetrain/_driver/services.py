"""The parts of the driver that every attempt of a run uses."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain._base.interrupts import Interrupts
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.callback import Callbacks
from drivetrain._hooks.context import Run
from drivetrain._storage.manifest import CheckpointManager

__all__ = ["RunServices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunServices:
    """The parts of the driver that every attempt of a run uses.

    Attributes:
        run: the facts about the run.
        backend: the backend that sets up the framework on the workers.
        checkpoints: the committed checkpoints.
        callbacks: the dispatcher of callback hooks.
        interrupts: requests to end the run, such as Ctrl-C or a cancellation.
    """

    run: Run
    backend: Backend
    checkpoints: CheckpointManager
    callbacks: Callbacks
    interrupts: Interrupts
