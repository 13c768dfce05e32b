"""What workers tell the controller, in the order in which each rank said it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = [
    "TRAINING",
    "Asking",
    "Counted",
    "Event",
    "Exited",
    "Failed",
    "Noticed",
    "PhaseEntered",
    "Pickled",
    "PreemptionInfo",
    "Renumbered",
    "Reported",
    "Returned",
    "Uploaded",
]

TRAINING = "running the train function"


class PhaseEntered(NamedTuple):
    """A rank entered a phase, such as setting up its backend or running the train function, at a Unix time."""

    rank: int
    phase: str
    time: float


class Reported(NamedTuple):
    """A rank called ``report``.

    ``number`` is 1 for its first report in this attempt; after a rank was replaced, all ranks go on from one number.
    ``time`` is Unix time in seconds by its clock; ``directory`` is the checkpoint's, in the run directory, or None
    without a checkpoint; ``files`` are those it has uploaded, by relative path, or None while they are being uploaded.
    A ``quiet`` one is made for its checkpoint alone: it is no iteration, and no callback hears of it; ``quiet_so_far``
    counts those of the rank, itself included.
    """

    rank: int
    number: int
    time: float
    metrics: dict[str, Any]
    files: dict[str, StoredFile] | None
    reduce: Mapping[str, str] | None
    directory: str | None = None
    quiet: bool = False
    quiet_so_far: int = 0


class Uploaded(NamedTuple):
    """The files of a report that said they were being uploaded have been."""

    rank: int
    number: int
    files: dict[str, StoredFile]


class Pickled(NamedTuple):
    """A value that is unpickled only if somebody wants it."""

    data: bytes


class Returned(NamedTuple):
    """A rank's train function returned, or left by ``sys.exit()`` with success.

    ``value`` is None where nobody wants the rank's; ``preempted`` says that it had been told of a preemption.
    """

    rank: int
    value: Any
    preempted: bool = False


class Failed(NamedTuple):
    """A rank raised. ``error`` is what :func:`drivetrain._base.failure.rebuild_exception` takes."""

    rank: int
    time: float
    phase: str
    error: bytes | BaseException


class Exited(NamedTuple):
    """A rank's process, or its node, is gone.

    ``reason`` is the runtime's word where it knows more than the exit code, and ``kind`` what the end counts as.
    """

    rank: int
    exit_code: int | None
    reason: str
    kind: FailureKind = FailureKind.INFRASTRUCTURE


class Asking(NamedTuple):
    """A rank's train function asks for preemptions, and so can end early."""

    rank: int


class Counted(NamedTuple):
    """How often a rank's train function has asked for a preemption."""

    rank: int
    questions: int


class Renumbered(NamedTuple):
    """A rank's next report follows the one of the number that it was told, after another rank was replaced."""

    rank: int


class Noticed(NamedTuple):
    """A rank's process was asked to end, by a SIGTERM. Unless it is ``watched`` by its function, it does at once."""

    rank: int
    watched: bool


Event = PhaseEntered | Reported | Uploaded | Returned | Failed | Exited | Asking | Counted | Noticed | Renumbered


@dataclass(frozen=True, slots=True)
class PreemptionInfo:
    """Why the train function is to save its state and return.

    Attributes:
        reason: in words.
        deadline: Unix time in seconds at which the processes are ended if they are still there.
    """

    reason: str
    deadline: float
