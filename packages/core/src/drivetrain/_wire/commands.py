"""The commands that the driver sends to workers. :mod:`drivetrain._wire.events` has the opposite direction.

A worker performs ``Call``, ``JoinRun``, ``Train`` and ``FreeMemory`` on its main thread, one after another. The other
commands are for a running train function: another thread performs them at once, and the rank responds with an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain._wire.events import PreemptionInfo, ReportNumber

__all__ = [
    "Call",
    "Command",
    "CountSteps",
    "FreeMemory",
    "JoinRun",
    "Refuse",
    "Renumber",
    "RunningTaskCommand",
    "StopAfter",
    "Train",
]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function; the result is sent back.

    Attributes:
        payload: the pickled pair of the function and its arguments.
    """

    payload: bytes


@dataclass(frozen=True, slots=True)
class JoinRun:
    """Become a worker of a run, the first one of the process or a later one.

    The result is sent back: True if the process has imported modules that are out of date.

    Attributes:
        rank: the rank of this worker.
        log_directory: the directory for the process's output. The output is not redirected if this is None, or if
            it is in a run directory that does not exist on this node.
        shown: True to send the output to the driver too.
        module_path: the entries of the driver's ``sys.path``; missing ones are appended.
        environment: environment variables to set.
        defaults: environment variables to set unless they are set already.
        since: Unix time in seconds. An imported module is out of date if its file was changed later. None to check no
            modules.
    """

    rank: int
    log_directory: Path | None
    shown: bool = False
    module_path: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Train:
    """Run the train function.

    Attributes:
        rank: the rank of this worker.
        task: a pickled :class:`~drivetrain._wire.task.TrainTask`.
    """

    rank: int
    task: bytes


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free unused memory, because the run is over and the process waits for another one."""


@dataclass(frozen=True, slots=True)
class CountSteps:
    """Send :class:`~drivetrain._wire.events.StepsCounted`; the next step waits for :class:`StopAfter`."""


@dataclass(frozen=True, slots=True)
class StopAfter:
    """Notify the train function at a step, so that it saves its state and returns.

    Attributes:
        step: the step, the same for all ranks.
        info: the notice.
    """

    step: int
    info: PreemptionInfo


@dataclass(frozen=True, slots=True)
class Renumber:
    """Continue after a report number and count steps from 0, because another rank was replaced.

    The rank sends :class:`~drivetrain._wire.events.Renumbered`.

    Attributes:
        last_report: the number after which the next report is numbered, the same for all ranks.
    """

    last_report: ReportNumber


@dataclass(frozen=True, slots=True)
class Refuse:
    """Exit, because the driver does not accept this worker. Sent instead of the first command.

    Attributes:
        reason: the error message.
    """

    reason: str


RunningTaskCommand = CountSteps | StopAfter | Renumber
Command = Call | JoinRun | Train | FreeMemory | Refuse | RunningTaskCommand
