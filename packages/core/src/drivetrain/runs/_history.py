"""The history of a run, built from the records of its timeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain._storage.timeline import (
    AttemptEnded,
    AttemptFailed,
    AttemptResumed,
    AttemptStarted,
    CheckpointCommitted,
    DriverStarted,
    NoteAdded,
    RunEnded,
    TimelineRecord,
    VersionsFound,
)

__all__ = ["Attempt", "History"]


@dataclass(kw_only=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        start: the number of the driver that made the attempt; the run's first driver is number 1.
        number: the number of the attempt among those of the same driver, from 0.
        began: Unix time in seconds at which all workers of the attempt had started.
        ended: Unix time in seconds at which the attempt ended; None while it runs, or if its end was not recorded. When
            another attempt or driver starts after it, a missing end becomes the time of the last record before that.
        workers: the worker of each rank, as the fields of :class:`~drivetrain.plugin.WorkerInfo`.
        resumed_from: the iteration from which the attempt resumed; None if it started from the beginning.
        failure: the failure that ended the attempt, in the format of ``error.json``, with ``traceback`` and ``log``;
            None without a failure.
        survived: the failures that did not end the attempt, because only the lost ranks were replaced. They have the
            same format as ``failure`` and are sorted, oldest first.
    """

    start: int
    number: int
    began: float
    ended: float | None = None
    workers: list[dict[str, Any]] = field(default_factory=list)
    resumed_from: int | None = None
    failure: dict[str, Any] | None = None
    survived: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class History:
    """The history of a run; :meth:`add` processes the records in order.

    Attributes:
        starts: the number of drivers so far.
        environment: information about the last driver's process, machine and packages.
        attempts: the attempts, oldest first.
        committed: the name, iteration and time of every committed checkpoint, by the checkpoint's name.
        outcome: a value of :class:`~drivetrain._base.outcome.RunOutcome`; empty if the last driver recorded none.
        error_line: the first line of the error that ended the last driver; empty without an error.
        ended: Unix time in seconds at which the last driver ended; None if it did not record its end.
        notes: the time, source and text of each event that another program has added to the timeline.
        last_time: Unix time in seconds of the last record, without notes that were added after the end.
    """

    starts: int = 0
    environment: dict[str, Any] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    committed: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcome: str = ""
    error_line: str = ""
    ended: float | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    last_time: float = 0.0

    def add(self, record: TimelineRecord) -> None:
        """Add the next record of the timeline."""
        match record:
            case DriverStarted():
                self._end_attempt(self.last_time)  # for a previous driver that was killed
                self.starts += 1
                self.environment = {**record.environment, "packages": {}}
                self.outcome, self.error_line, self.ended = "", "", None
            case VersionsFound():
                self.environment = {**self.environment, "packages": record.packages}
            case AttemptStarted():
                self._end_attempt(self.last_time)
                self.attempts.append(
                    Attempt(start=self.starts, number=record.attempt, began=record.time, workers=record.workers)
                )
            case AttemptResumed():
                if self.attempts:
                    self.attempts[-1].resumed_from = record.iteration or None
            case CheckpointCommitted():
                entry = {"name": record.name, "iteration": record.iteration, "time": record.time}
                self.committed[record.name] = entry
            case AttemptFailed():
                self._add_failure(record)
            case AttemptEnded():
                self._end_attempt(record.time)
            case RunEnded():
                self.outcome, self.error_line, self.ended = record.outcome, record.error or "", record.time
            case NoteAdded():
                self.notes.append(asdict(record))
                if self.ended is not None:  # the run lasts no longer because of it
                    return
        self.last_time = max(self.last_time, record.time)

    def _add_failure(self, record: AttemptFailed) -> None:
        if not self.attempts:
            return
        details = {"retrying": record.retrying, "traceback": record.traceback, "log": record.log}
        failure = {**record.failure, **details}
        if failure.get("survived"):
            self.attempts[-1].survived.append(failure)
        else:
            self.attempts[-1].failure = failure

    def _end_attempt(self, time: float) -> None:
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended = max(time, self.attempts[-1].began)
