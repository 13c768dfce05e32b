"""The format of ``timeline.jsonl``: the events of a run with their times, one JSON record per line.

The file is for people and tools that inspect a run; resuming a run does not need it. So if a record cannot be written,
the run continues without this record, and a reader skips unknown and incomplete records. Newer versions may add records
and fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from drivetrain._base.redact import redact_strings
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import TIMELINE_FILE, run_file
from drivetrain._storage.reading import is_number
from drivetrain._storage.reports import last_activity, read_lines

__all__ = [
    "AttemptEnded",
    "AttemptFailed",
    "AttemptResumed",
    "AttemptStarted",
    "CheckpointCommitted",
    "DriverStarted",
    "NoteAdded",
    "RunEnded",
    "TimelineRecord",
    "VersionsFound",
    "add_note",
    "append_record",
    "find_lost_attempt",
    "read_timeline",
]


@dataclass(frozen=True, kw_only=True)
class TimelineRecord:
    """Base of all records.

    Attributes:
        time: Unix time of the event in seconds.
    """

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class DriverStarted(TimelineRecord):
    """A driver started the run or resumed it.

    Attributes:
        environment: the driver's host, operating system, CPUs, memory and Python version, by name.
    """

    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class VersionsFound(TimelineRecord):
    """The driver has determined the versions of the installed distributions.

    Attributes:
        packages: the version of each distribution, by the name of the distribution.
    """

    packages: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(TimelineRecord):
    """The workers of an attempt have started.

    Attributes:
        attempt: the number of the attempt. Each driver counts its attempts from 0.
        workers: for each rank, the fields of its :class:`~drivetrain.plugin.WorkerInfo`.
    """

    attempt: int
    workers: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class AttemptResumed(TimelineRecord):
    """A later attempt, or a resumed run, continues from a checkpoint, or from the beginning if there is none.

    Attributes:
        iteration: the iteration of the checkpoint's report; 0 without a checkpoint.
    """

    iteration: int


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(TimelineRecord):
    """A checkpoint was committed.

    Attributes:
        name: the checkpoint's directory in the run directory.
        iteration: the iteration of the checkpoint's report.
    """

    name: str
    iteration: int


@dataclass(frozen=True, kw_only=True)
class AttemptFailed(TimelineRecord):
    """The attempt failed, or it lost ranks and continued.

    Attributes:
        failure: the root cause, with the same fields as in ``error.json``.
        retrying: whether the run continues, for example with another attempt.
        traceback: the end of the exception's traceback; empty without an exception.
        log: the end of the failed rank's output.
    """

    failure: dict[str, Any]
    retrying: bool
    traceback: str
    log: str


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(TimelineRecord):
    """The workers of an attempt are being terminated. If the driver was killed, the next driver records this.

    Attributes:
        attempt: the number of the attempt. Each driver counts its attempts from 0.
    """

    attempt: int


@dataclass(frozen=True, kw_only=True)
class RunEnded(TimelineRecord):
    """A driver has ended its work on the run.

    Attributes:
        outcome: the value of a :class:`~drivetrain._base.outcome.RunOutcome`, such as ``"finished"``.
        error: the first line of the error that ended the run, or None.
    """

    outcome: str
    error: str | None


@dataclass(frozen=True, kw_only=True)
class NoteAdded(TimelineRecord):
    """A program other than drivetrain's driver has recorded an event of the run: see :func:`add_note`.

    Attributes:
        source: the name of the program.
        text: the event.
    """

    source: str
    text: str


_RECORDS: dict[str, type[TimelineRecord]] = {
    "start": DriverStarted,
    "packages": VersionsFound,
    "attempt": AttemptStarted,
    "resume": AttemptResumed,
    "checkpoint": CheckpointCommitted,
    "failure": AttemptFailed,
    "attempt end": AttemptEnded,
    "end": RunEnded,
    "note": NoteAdded,
}
"""The class of each record, by the value of ``event`` in the file."""

_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "float": is_number,
    "int": lambda value: isinstance(value, int) and is_number(value),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
    "list[dict[str, Any]]": lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
}
"""For each declared type of a field, a function that returns True if a value from the file is valid for the field."""

_EVENTS = {kind: event for event, kind in _RECORDS.items()}


def append_record(directory: Path, record: TimelineRecord) -> None:
    """Append a record to the timeline file in a local directory. Errors of the filesystem are ignored."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    text = json.dumps(redact_strings({"time": record.time, "event": _EVENTS[type(record)], **values}), default=str)
    line = text.encode() + b"\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(
            directory / TIMELINE_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, run_file(TIMELINE_FILE).mode
        )
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # a driver was killed while it wrote a line
                line = b"\n" + line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def add_note(directory: Path, source: str, text: str) -> None:
    """Add an event to the timeline of a run in a local directory, for the run's page. The run may be in use.

    If the file cannot be written, nothing happens.

    Args:
        directory: the run directory.
        source: the name of the program or callback that adds it.
        text: the event, in one sentence.
    """
    append_record(directory, NoteAdded(source=source, text=text))


def read_timeline(storage: Storage) -> Iterator[TimelineRecord]:
    """Yield the records of a run, oldest first. Without a timeline file, there are no records."""
    for line in read_lines(storage, TIMELINE_FILE):
        record = _parse(line)
        if record is not None:
            yield record


def find_lost_attempt(storage: Storage) -> AttemptEnded | None:
    """Return the missing record of the end of an attempt whose driver was killed; None if no end is missing.

    The time of the record is that of the last known activity.
    """
    attempt, last_time = None, 0.0
    for record in read_timeline(storage):
        last_time = record.time
        if isinstance(record, AttemptStarted):
            attempt = record.attempt
        elif isinstance(record, (AttemptEnded, DriverStarted, RunEnded)):
            attempt = None
    return None if attempt is None else AttemptEnded(attempt=attempt, time=max(last_time, last_activity(storage)))


def _parse(line: Mapping[str, Any]) -> TimelineRecord | None:
    kind = _RECORDS.get(str(line.get("event")))
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for each in fields(kind):
        value = line.get(each.name)
        if not _IS_VALID[str(each.type)](value):  # the field is missing, or has another type
            return None
        values[each.name] = value
    return kind(**values)
