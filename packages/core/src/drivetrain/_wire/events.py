"""The events that workers send to the driver. :mod:`drivetrain._wire.commands` defines the opposite direction.

The events of one rank arrive in the order in which the rank sends them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from drivetrain.errors import FailureKind

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = [
    "CheckpointRanks",
    "Draining",
    "Event",
    "Exited",
    "Failed",
    "FilesAnnounced",
    "PhaseEntered",
    "Pickled",
    "PreemptionInfo",
    "PreemptionPolled",
    "Progressed",
    "RankEvent",
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
        """Return a description of the activity of a rank in this state, for messages.

        Args:
            backend: the name of the backend.
        """
        return self.value.format(backend=backend)


class ReportNumber(NamedTuple):
    """The two numbers of a report.

    Attributes:
        number: counts all reports of a rank within the run. Reports of different ranks with the same number belong
            together, and by default, their checkpoint's directory is named after this number. A new attempt continues
            after the highest number of the earlier attempts, so that no number is reused.
        iteration: the number that is shown to users. It counts only the reports that are not quiet. A resumed run
            continues from the iteration of its checkpoint.
    """

    number: int
    iteration: int


class PhaseEntered(NamedTuple):
    """A rank entered a state, such as ``TRAINING``.

    ``time`` is Unix time in seconds. ``clock`` is the time in seconds of a clock that is never set, or None.
    """

    rank: int
    state: RankState
    time: float
    clock: float | None = None


CheckpointRanks = tuple[int, ...] | Literal["all", "together"] | None


class Reported(NamedTuple):
    """A rank called ``report``.

    ``number`` and ``iteration`` are the fields of a :class:`ReportNumber`, stored directly because this event is sent
    often. ``time`` is Unix time in seconds, on the rank's clock. ``reduce`` maps names of metrics to the way to combine
    them over the ranks. ``directory`` is the name of the checkpoint's directory in the run directory, or None without a
    checkpoint. ``files`` maps relative paths to the uploaded files, or is None while they are being uploaded. A
    ``quiet`` report exists only for its checkpoint: it is not an iteration, and callbacks do not receive it.
    ``checkpoint_ranks`` are the ranks that take part in the checkpoint, or None if the rank does not know them;
    "together" means that all ranks have saved into the same directory. The checkpoint is ``awaited`` if the rank waits
    for :class:`~drivetrain._wire.commands.CommitState`. ``clock`` is as in :class:`PhaseEntered`.
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
    checkpoint_ranks: CheckpointRanks = None
    awaited: bool = False
    clock: float | None = None


class FilesAnnounced(NamedTuple):
    """A rank is about to store files for the checkpoint of its next report, which has this number."""

    rank: int
    number: int


class CommitOverdue(NamedTuple):
    """A rank has waited too long for the commit of a checkpoint, and asks which ranks it waits for."""

    rank: int
    number: int


class FilesClaimed(NamedTuple):
    """A rank is about to upload files to remote storage, and waits for :class:`~drivetrain._wire.commands.StoreApart`.

    ``directory`` is the name of the checkpoint's directory, and ``names`` are the relative paths of the files.
    """

    rank: int
    directory: str
    names: tuple[str, ...]


class Uploaded(NamedTuple):
    """The background upload of a report's files is complete."""

    rank: int
    number: int
    files: dict[str, StoredFile]


class Pickled(NamedTuple):
    """A value that is unpickled only if it is needed."""

    data: bytes


class Returned(NamedTuple):
    """A rank's train function returned, or called ``sys.exit()`` with success.

    ``value`` is None if the driver does not need this rank's value. ``unfinished`` is True if the function has called
    :func:`drivetrain.resume_later`. ``at_notice`` is True if it has received a preemption notice, and has made at most
    one report since.
    """

    rank: int
    value: Any
    unfinished: bool = False
    at_notice: bool = False


class Failed(NamedTuple):
    """A rank raised an exception. :func:`drivetrain._base.failure.rebuild_exception` rebuilds it from ``error``.

    ``kind`` is the category of the exception, if the backend knows it.
    """

    rank: int
    time: float
    state: RankState
    error: bytes | BaseException
    kind: FailureKind | None = None


class Exited(NamedTuple):
    """A rank's process exited, or its node was lost.

    ``reason`` describes the exit if the runtime knows more than the exit code, and is empty otherwise. ``kind`` is the
    category of the failure.
    """

    rank: int
    exit_code: int | None
    reason: str
    kind: FailureKind = FailureKind.INFRASTRUCTURE


class Draining(NamedTuple):
    """The runtime has learned that the nodes or processes of ranks will be terminated.

    ``deadline`` is the Unix time in seconds of the termination, or None if it is unknown. ``reason`` is the text for
    :attr:`PreemptionInfo.reason`.
    """

    ranks: tuple[int, ...]
    deadline: float | None
    reason: str


class PreemptionPolled(NamedTuple):
    """A rank's train function called ``get_preemption_info()`` for the first time, so it is able to end gracefully."""

    rank: int


class Progressed(NamedTuple):
    """A rank has made progress since the previous event: a heartbeat, or a call to ``get_preemption_info()``."""

    rank: int


class StepsCounted(NamedTuple):
    """The response to :class:`~drivetrain._wire.commands.CountSteps`: the number of steps that the rank has begun.

    A step is a call to ``get_preemption_info()``.
    """

    rank: int
    steps: int


class Renumbered(NamedTuple):
    """The response to :class:`~drivetrain._wire.commands.Renumber`, after the rank has performed that command."""

    rank: int


class SigtermReceived(NamedTuple):
    """A rank's process received SIGTERM. If ``graceful``, the train function can save; otherwise the process exits."""

    rank: int
    graceful: bool


RankEvent = (
    PhaseEntered
    | Reported
    | FilesAnnounced
    | CommitOverdue
    | FilesClaimed
    | Uploaded
    | Returned
    | Failed
    | Exited
    | PreemptionPolled
    | StepsCounted
    | SigtermReceived
    | Renumbered
    | Progressed
)
Event = RankEvent | Draining


@dataclass(frozen=True, slots=True)
class PreemptionInfo:
    """The notice that the train function should save its state, because its processes will be terminated.

    Attributes:
        reason: why the run is being preempted, as text to show in messages.
        deadline: Unix time in seconds at which processes that are still running are terminated.
        ranks: the ranks whose processes or nodes are being terminated; empty if the driver was asked to end the run, or
            if the run is about to grow.
    """

    reason: str
    deadline: float
    ranks: tuple[int, ...] = ()
