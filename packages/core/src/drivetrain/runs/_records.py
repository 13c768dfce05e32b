"""Reads all information about a finished or running run from its directory."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain._base.metrics import flatten, reported_metrics
from drivetrain._base.redact import redact_strings
from drivetrain._storage.checkpoint import parse_listing
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import ERROR_FILE, LISTING_FILE, RUN_FILE, USAGE_FILE
from drivetrain._storage.lock import Holder, find_holder
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.reading import Fields, damage_of, is_number
from drivetrain._storage.reports import last_activity, last_report, read_lines
from drivetrain._storage.timeline import read_timeline
from drivetrain.errors import StorageError
from drivetrain.runs._history import History

__all__ = ["RunRecord", "checkpoint_sizes", "read_run", "read_usage", "summarize_run", "unreadable_run"]

_MAX_SAMPLES = 400
_RANK_DIGITS = 10


@dataclass(kw_only=True)
class RunRecord:
    """A run, as described by the files in its directory.

    Attributes:
        name: the run's name.
        location: the path of the run directory on its filesystem.
        status: ``running``, ``locked`` (a driver on another machine holds the lock; that driver may have died),
            ``finished``, ``failed``, ``interrupted``, or ``ended`` (no driver runs it and no outcome was recorded: its
            driver was killed, or was of a version that does not record outcomes).
        holder: a description of the driver that holds the run's lock; empty if there is none.
        facts: the content of ``run.json``.
        began: Unix time in seconds at which the run's first driver started.
        history: the drivers, attempts and commits so far.
        checkpoints: the committed checkpoints that have not been deleted, oldest first.
        error: the content of ``error.json``; None if there is no such file.
        metrics: the last report of rank 0; None if rank 0 has not reported.
        active_at: Unix time in seconds of the last sign that the workers were running; 0 if there is none, or if the
            last driver recorded its end.
    """

    name: str
    location: str
    status: str
    holder: str
    facts: dict[str, Any]
    began: float
    history: History
    checkpoints: list[CommittedCheckpoint]
    error: dict[str, Any] | None
    metrics: dict[str, Any] | None
    active_at: float

    @property
    def is_live(self) -> bool:
        """True if a driver runs the run, or might still run it."""
        return self.status in ("running", "locked")

    @property
    def ended(self) -> float | None:
        """Unix time in seconds at which the last driver ended; None if the run is live or no end was recorded."""
        return None if self.is_live else self.history.ended

    @property
    def error_line(self) -> str:
        """The first line of the error that ended the last driver; empty without an error, or while a driver runs."""
        return "" if self.status == "running" else self.history.error_line

    @property
    def last_time(self) -> float:
        """Unix time in seconds of the last record in the timeline, sign of the workers, or commit."""
        return max([self.history.last_time, self.active_at, *(entry.time for entry in self.checkpoints[-1:])])

    @property
    def deleted_checkpoints(self) -> list[dict[str, Any]]:
        """The name, iteration and time of each committed checkpoint that has been deleted since."""
        kept = {checkpoint.name for checkpoint in self.checkpoints}
        return [entry for name, entry in self.history.committed.items() if name not in kept]

    @property
    def iterations(self) -> int:
        """The number of reports of rank 0."""
        return int((self.metrics or {}).get("_training_iteration", 0))

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the first driver to the end of the run, or to its last known activity."""
        return max(0.0, (self.ended or self.last_time) - self.began)

    def summary(self) -> dict[str, Any]:
        """Return the values of the run's row in a table of runs."""
        return {
            "name": self.name,
            "status": self.status,
            "began": self.began,
            "duration_s": round(self.duration_s, 3),
            "attempts": len(self.history.attempts),
            "workers": len(self.history.attempts[-1].workers) if self.history.attempts else None,
            "reports": self.iterations,
            "checkpoints": len(self.checkpoints),
            "metrics": reported_metrics(self.metrics),
            "error": self.error_line,
            "location": self.location,
        }

    def details(self) -> dict[str, Any]:
        """Return all information about the run, as a dict for JSON."""
        return {
            **self.summary(),
            "id": self.facts.get("id"),
            "holder": self.holder,
            "ended": self.ended,
            "last_time": self.last_time,
            "starts": self.facts.get("starts"),
            "trainer": self.facts.get("trainer"),
            "train_function": self.facts.get("train_function"),
            "train_loop_config": self.facts.get("train_loop_config"),
            "scaling_config": self.facts.get("scaling_config"),
            "run_config": self.facts.get("run_config"),
            "drivetrain": self.facts.get("drivetrain"),
            "python": self.facts.get("python"),
            "environment": self.history.environment,
            "attempts": [asdict(attempt) for attempt in self.history.attempts],
            "notes": self.history.notes,
            "checkpoints": [
                {**asdict(checkpoint), "metrics": flatten(checkpoint.metrics)} for checkpoint in self.checkpoints
            ],
            "dropped_checkpoints": self.deleted_checkpoints,
            "failure": self.error,
        }


def read_run(storage: Storage) -> RunRecord:
    """Read a run directory without changing or locking it.

    Raises:
        StorageError: the directory contains no run, the run cannot be read, or a newer drivetrain wrote it.
    """
    with damage_of(storage.root):
        storage.require_known_version()
        facts = storage.read_json(RUN_FILE)
        if facts is None:
            raise StorageError(
                f"[DT-703] {storage.root}: expected a run directory with {RUN_FILE}, got a directory without it"
            )
        history = History()
        for record in read_timeline(storage):
            history.add(record)
        holder = find_holder(storage)
        error = storage.read_json(ERROR_FILE)
        if error is not None:
            error.text("message")
        began = facts.number("created", 0)
        if not began and storage.is_local:
            began = os.stat(storage.path(RUN_FILE)).st_mtime
        return RunRecord(
            name=facts.text("name", "") or os.path.basename(storage.root),
            location=storage.root,
            status=_status(holder, history, error),
            holder=holder.description if holder else "",
            facts=redact_strings(facts.values),
            began=began,
            history=history,
            checkpoints=read_manifest(storage),
            error=redact_strings(error.values) if error is not None else None,
            metrics=last_report(storage),
            active_at=last_activity(storage) if history.ended is None else 0.0,
        )


def summarize_run(storage: Storage) -> dict[str, Any]:
    """Return the values of a run's row in a table of runs.

    If the run cannot be read, its ``status`` is ``unreadable`` and its ``error`` is the reason.
    """
    try:
        with damage_of(storage.root):
            return read_run(storage).summary()
    except StorageError as error:
        return unreadable_run(storage, str(error))


def unreadable_run(storage: Storage, reason: str) -> dict[str, Any]:
    """Return the values of a run's row in a table of runs, for a run that cannot be read."""
    return {
        "name": os.path.basename(storage.root.rstrip("/")),
        "status": "unreadable",
        "began": 0.0,
        "duration_s": 0.0,
        "attempts": 0,
        "workers": None,
        "reports": 0,
        "checkpoints": 0,
        "metrics": {},
        "error": reason,
        "location": storage.root,
    }


def _status(holder: Holder | None, history: History, error: Fields | None) -> str:
    if holder is not None:
        return "running" if holder.is_certain else "locked"
    if history.outcome:
        return history.outcome
    return "failed" if error else "ended"


def checkpoint_sizes(storage: Storage, name: str) -> tuple[int, int] | None:
    """Return the total bytes and the number of files of a committed checkpoint; None if its listing cannot be read."""
    try:
        data = storage.read_bytes(f"{name}/{LISTING_FILE}")
        if data is None:
            return None
        files, _ = parse_listing(data, name)
    except StorageError:
        return None
    return sum(file.size for file in files.values()), len(files)


def read_usage(storage: Storage) -> list[dict[str, Any]]:
    """Return the resource usage over time: for each rank, the parallel lists ``time``, ``cpus`` and ``bytes``.

    If a rank has too many samples, neighboring samples are combined into one, with the mean of their CPUs and the
    maximum of their memory.
    """
    ranks: dict[int, list[tuple[float, float, int]]] = {}
    for line in read_lines(storage, USAGE_FILE):
        samples = line.get("ranks")
        for rank, sample in samples.items() if isinstance(samples, dict) else ():
            match [line.get("time"), rank, sample]:
                case [time, str(rank), [cpus, memory, *_]] if (
                    all(map(is_number, (time, cpus, memory))) and rank.isdecimal() and len(rank) < _RANK_DIGITS
                ):
                    ranks.setdefault(int(rank), []).append((time, cpus, memory))
    usage = []
    for rank, samples in sorted(ranks.items()):
        width = math.ceil(len(samples) / _MAX_SAMPLES)
        groups = [samples[start : start + width] for start in range(0, len(samples), width)]
        usage.append(
            {
                "rank": rank,
                "time": [group[-1][0] for group in groups],
                "cpus": [round(sum(sample[1] for sample in group) / len(group), 2) for group in groups],
                "bytes": [max(sample[2] for sample in group) for group in groups],
            }
        )
    return usage
