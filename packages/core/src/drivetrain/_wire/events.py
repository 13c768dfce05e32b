"""The events that workers send to the driver. :mod:`drivetrain._wire.commands` has the opposite direction.

The events of one rank arrive in the order in which it sends them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = [
    "Event",
    "Exited",
    "Failed",
    "PhaseEntered",
    "Pickled",
    "PreemptionInfo",
    "PreemptionPolled",
    "RankState",
    "Renumbered",
    "ReportNumber",
    "Reported",
    "Returned",
    "SigtermReceived",
    "StepsCounted",
    "Uploaded",
]


class RankState(enum.Enum):
    """The state of a rank. :meth:`describe` returns its description for users."""

    WAITING = "waiting to start"
    LOADING = "loading the train function"
    SETTING_UP = "setting up {backend}"
    TRAINING = "running the train function"
    TEARING_DOWN = "tearing down {backend}"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"

    def describe(self, backend: str) -> str:
        """Return what a rank in this state is doing, for messages.

        Args:
            backend: the name of the backend.
        """
        return self.value.format(backend=backend)


class ReportNumber(NamedTuple):
    """The two numbers of a report.

    Attributes:
        number: counts all reports of a rank within the run. It matches the reports of different ranks, names the
            checkpoint's directory, and is never used twice: a new attempt continues after the highest one.
        iteration: the number shown to users. It counts the reports that are not quiet. A resumed run continues counting
            from its checkpoint.
    """

    number: int
    iteration: int


class PhaseEntered(NamedTuple):
    """A rank entered a state, such as ``TRAINING``, at a Unix time."""

    rank: int
    state: RankState
    time: float


class Reported(NamedTuple):
    """A rank called ``report``.

    ``number`` and ``iteration`` are a :class:`ReportNumber`, flat because this event is sent often. ``time`` is Unix
    time in seconds by the rank's clock. ``directory`` is the directory of the checkpoint in the run directory, or None
    without a checkpoint. ``files`` are the uploaded files by relative path, or None while they are being uploaded. A
    ``quiet`` report exists only for its checkpoint: it is not an iteration, and callbacks do not receive it.
    """

    rank: int
    number: int
    iteration: int
    time: float
    metrics: dict[str, Any]
    files: dict[str, StoredFile] | None
    reduce: Mapping[str, str] | None
    directory: str | None = None
    quiet: bool = False


class Uploaded(NamedTuple):
    """The upload of a report's files in the background is complete."""

    rank: int
    number: int
    files: dict[str, StoredFile]


class Pickled(NamedTuple):
    """A value that is unpickled only if it is needed."""

    data: bytes


class Returned(NamedTuple):
    """A rank's train function returned, or called ``sys.exit()`` with success.

    ``value`` is None if this rank's value is not needed. ``preempted`` is True if the function had received a notice.
    """

    rank: int
    value: Any
    preempted: bool = False


class Failed(NamedTuple):
    """A rank raised an exception. ``error`` is for :func:`drivetrain._base.failure.rebuild_exception`."""

    rank: int
    time: float
    state: RankState
    error: bytes | BaseException


class Exited(NamedTuple):
    """A rank's process exited, or its node was lost.

    ``reason`` is set by a runtime that knows more than the exit code; ``kind`` is the category of the failure.
    """

    rank: int
    exit_code: int | None
    reason: str
    kind: FailureKind = FailureKind.INFRASTRUCTURE


class PreemptionPolled(NamedTuple):
    """A rank's train function called ``get_preemption_info()`` for the first time: it is able to end gracefully."""

    rank: int


class StepsCounted(NamedTuple):
    """The response to :class:`~drivetrain._wire.commands.CountSteps`: the number of steps that have begun.

    A step is a call to ``get_preemption_info()``.
    """

    rank: int
    steps: int


class Renumbered(NamedTuple):
    """The response to :class:`~drivetrain._wire.commands.Renumber`."""

    rank: int


class SigtermReceived(NamedTuple):
    """A rank's process received SIGTERM. If ``graceful``, its train function can save first; otherwise it exits now."""

    rank: int
    graceful: bool


Event = (
    PhaseEntered
    | Reported
    | Uploaded
    | Returned
    | Failed
    | Exited
    | PreemptionPolled
    | StepsCounted
    | SigtermReceived
    | Renumbered
)


@dataclass(frozen=True, slots=True)
class PreemptionInfo:
    """The notice that the train function should save its state and return.

    Attributes:
        reason: the reason, for messages.
        deadline: Unix time in seconds at which processes that are still running are terminated.
    """

    reason: str
    deadline: float
