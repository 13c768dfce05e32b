"""What workers tell the controller, in the order in which each rank said it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["TRAINING", "Event", "Exited", "Failed", "PhaseEntered", "Pickled", "Reported", "Returned"]

TRAINING = "running the train function"


class PhaseEntered(NamedTuple):
    """A rank entered a phase, such as setting up its backend or running the train function, at a Unix time."""

    rank: int
    phase: str
    time: float


class Reported(NamedTuple):
    """A rank called ``report``.

    ``number`` is 1 for its first report in this attempt; ``time`` is Unix time in seconds by its clock;
    ``files`` are the sizes of the checkpoint files it has uploaded, by relative path, or None without a checkpoint.
    """

    rank: int
    number: int
    time: float
    metrics: dict[str, Any]
    files: dict[str, int] | None
    reduce: Mapping[str, str] | None


class Pickled(NamedTuple):
    """A value that is unpickled only if somebody wants it."""

    data: bytes


class Returned(NamedTuple):
    """A rank's train function returned, or left by ``sys.exit()`` with success. ``value`` is rank 0's."""

    rank: int
    value: Any


class Failed(NamedTuple):
    """A rank raised. ``error`` is what :func:`drivetrain.failure.rebuild_exception` takes."""

    rank: int
    time: float
    phase: str
    error: bytes | BaseException


class Exited(NamedTuple):
    """A rank's process, or its node, is gone. ``reason`` is the runtime's word where there is no exit code."""

    rank: int
    exit_code: int | None
    reason: str


Event = PhaseEntered | Reported | Returned | Failed | Exited
