"""The commands that the driver sends to workers. :mod:`drivetrain._wire.events` defines the opposite direction.

A worker performs ``Call``, ``JoinRun``, ``Train`` and ``FreeMemory`` on its main thread, one after another. ``Refuse``
ends the process. The other commands are for a running train function, and another thread performs them at once. The
rank responds to ``CountSteps`` and ``Renumber`` with an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain._wire.events import PreemptionInfo, ReportNumber

__all__ = [
    "Call",
    "Command",
    "CommitState",
    "CountSteps",
    "FreeMemory",
    "Interrupt",
    "JoinRun",
    "Refuse",
    "Renumber",
    "RunningTaskCommand",
    "StopAfter",
    "StoreApart",
    "Train",
]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function, and send its result to the driver.

    Attributes:
        payload: a pickled pair of the function and a tuple of its arguments.
    """

    payload: bytes


@dataclass(frozen=True, slots=True)
class JoinRun:
    """Become a worker of a run. A process may join several runs, one after another.

    The worker sends a result to the driver: True if the process has imported modules that are out of date.

    Attributes:
        rank: the rank of this worker.
        log_directory: the directory for the file to which the process's output is redirected; None to write no file. If
            it belongs to a run directory that does not exist on this node, no file is written either.
        shown: True to send the output to the driver too. Otherwise, output that is written to no file is discarded if
            ``log_directory`` is None, and not redirected if the run directory does not exist on this node.
        keeps_output: True to redirect nothing, because the driver reads the output from a pipe.
        module_path: the entries of the driver's ``sys.path``. The worker appends missing ones to its own.
        environment: environment variables to set.
        defaults: environment variables to set unless they are set already.
        imported_since: Unix time in seconds. An imported module is out of date if its file was changed after this time.
            None to check no modules.
    """

    rank: int
    log_directory: Path | None
    shown: bool = False
    keeps_output: bool = False
    module_path: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    imported_since: float | None = None


@dataclass(frozen=True, slots=True)
class Train:
    """Run the train function.

    Attributes:
        rank: the rank of this worker.
        task: a pickled :class:`~drivetrain._wire.task.TrainTask`.
        progress_interval_s: seconds between two :class:`~drivetrain._wire.events.Progressed` events; None to send none.
    """

    rank: int
    task: bytes
    progress_interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free unused memory, because the run is over and the process waits for another run."""


@dataclass(frozen=True, slots=True)
class CountSteps:
    """Send :class:`~drivetrain._wire.events.StepsCounted`. The rank's next step waits for :class:`StopAfter`."""


@dataclass(frozen=True, slots=True)
class StopAfter:
    """Notify the train function at a certain step, so that it saves its state and returns.

    Attributes:
        step: the number of the step from which on ``get_preemption_info()`` returns the notice; the same for all ranks.
        info: the notice.
    """

    step: int
    info: PreemptionInfo


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Send a signal to the main thread, which runs the train function, because the driver has received it.

    Attributes:
        number: the number of the signal.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Renumber:
    """Number the next report after ``last_report``, and count steps from 0, because another rank was replaced.

    The rank responds with :class:`~drivetrain._wire.events.Renumbered`.

    Attributes:
        last_report: the numbers that directly precede those of the rank's next report; the same for all ranks.
    """

    last_report: ReportNumber


@dataclass(frozen=True, slots=True)
class CommitState:
    """Tells a rank in ``report(wait=True)`` that its checkpoint is committed, or which ranks it waits for.

    Attributes:
        number: the number of the report.
        is_committed: True if the checkpoint is committed.
        missing: otherwise, the ranks that have not made the report, or have not uploaded their files.
    """

    number: int
    is_committed: bool
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreApart:
    """The response to :class:`~drivetrain._wire.events.FilesClaimed`.

    Attributes:
        directory: the name of the checkpoint's directory.
        names: the relative paths of the files that another rank stores too.
    """

    directory: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Exit, because the driver does not accept this worker. Sent instead of the first command.

    Attributes:
        reason: the error message.
    """

    reason: str


RunningTaskCommand = CountSteps | StopAfter | Interrupt | Renumber | CommitState | StoreApart
Command = Call | JoinRun | Train | FreeMemory | Refuse | RunningTaskCommand
