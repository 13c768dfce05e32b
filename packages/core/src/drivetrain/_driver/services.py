"""The objects that all attempts of a run share."""

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
    """The objects that all attempts of a run share.

    Attributes:
        run: information about the run.
        backend: the backend that sets up the framework on the workers.
        checkpoints: manages the committed checkpoints.
        callbacks: calls the hooks of all callbacks.
        interrupts: requests to end the run, such as Ctrl-C or a cancellation.
    """

    run: Run
    backend: Backend
    checkpoints: CheckpointManager
    callbacks: Callbacks
    interrupts: Interrupts
