"""What there is to know about a run, read from its directory: of a run that has ended, or still goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain._base.metrics import flatten, reported_metrics
from drivetrain._storage.checkpoint import parse_listing
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import ERROR_FILE, LISTING_FILE, RUN_FILE, TIMELINE_FILE, USAGE_FILE
from drivetrain._storage.lock import find_holder
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.reports import last_report, read_lines
from drivetrain.errors import StorageError

__all__ = ["Attempt", "RunRecord", "find_runs", "read_run", "read_usage"]

_MAX_SAMPLES = 400


@dataclass(kw_only=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        start: which driver's, from 1.
        number: which of that driver's, from 0.
        began: Unix time in seconds at which its workers were up.
        ended: when it was over; None while it goes on, or where nobody could note it.
        workers: where each rank was, as :class:`~drivetrain.WorkerInfo` says it.
        resumed_from: the iteration that it went on from; None for a start from the beginning.
        failure: what ended it, as ``error.json`` says it, with ``traceback`` and ``log``; None if nothing did.
        survived: likewise what did not end it, as only lost ranks were replaced; oldest first.
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
class RunRecord:
    """A run, as its directory tells.

    Attributes:
        name: the run's name.
        location: its directory, on its filesystem.
        status: ``running``, ``locked`` (a driver on another machine has it, or has died there), ``finished``,
            ``failed``, ``interrupted``, ``ended`` (nobody works on it, and how it ended was not noted: its driver was
            killed, or is of a version that did not).
        holder: who works on it, in words; empty for nobody.
        facts: ``run.json``.
        began: Unix time in seconds at which its first driver began.
        ended: when its last driver ended; None while it goes on, or where nobody could note it.
        environment: where the last driver ran.
        attempts: oldest first.
        checkpoints: those that are committed and kept, oldest first.
        dropped: name, iteration and time of those that were committed and are no longer kept.
        error: ``error.json``; None where there is none.
        error_line: how the last driver ended, in a line; empty if well.
        metrics: the last report of rank 0; None without one.
        last_time: Unix time in seconds of the last sign of life that was noted.
    """

    name: str
    location: str
    status: str
    holder: str
    facts: dict[str, Any]
    began: float
    ended: float | None
    environment: dict[str, Any]
    attempts: list[Attempt]
    checkpoints: list[CommittedCheckpoint]
    dropped: list[dict[str, Any]]
    error: dict[str, Any] | None
    error_line: str
    metrics: dict[str, Any] | None
    last_time: float

    @property
    def is_live(self) -> bool:
        """Whether a driver works on it, or may."""
        return self.status in ("running", "locked")

    @property
    def iterations(self) -> int:
        """How many reports rank 0 has made."""
        return int((self.metrics or {}).get("_training_iteration", 0))

    @property
    def duration_s(self) -> float:
        """Seconds from its first start to its end, or to the last sign of life."""
        return max(0.0, (self.ended or self.last_time) - self.began)

    def summary(self) -> dict[str, Any]:
        """The facts that fit into a line of a table."""
        return {
            "name": self.name,
            "status": self.status,
            "began": self.began,
            "duration_s": round(self.duration_s, 3),
            "attempts": len(self.attempts),
            "workers": len(self.attempts[-1].workers) if self.attempts else None,
            "reports": self.iterations,
            "checkpoints": len(self.checkpoints),
            "metrics": reported_metrics(self.metrics),
            "error": self.error_line,
            "location": self.location,
        }

    def details(self) -> dict[str, Any]:
        """Everything, for JSON."""
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
            "environment": self.environment,
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "checkpoints": [
                {**asdict(checkpoint), "metrics": flatten(checkpoint.metrics)} for checkpoint in self.checkpoints
            ],
            "dropped_checkpoints": self.dropped,
            "failure": self.error,
        }


def find_runs(directory: Storage) -> Iterator[Storage]:
    """The run directories in a directory, by name; or that directory itself, if it is one."""
    if directory.exists(RUN_FILE):
        yield directory
        return
    for name in directory.list_names()[0]:
        run = Storage(directory.filesystem, directory.path(name), directory.limits)
        if run.exists(RUN_FILE):
            yield run


def read_run(storage: Storage) -> RunRecord:
    """Reads a run's directory; changes nothing, and needs no lock.

    Raises:
        StorageError: there is no run, or it cannot be read.
    """
    facts = _read_json(storage, RUN_FILE)
    if not isinstance(facts, dict):
        raise StorageError(f"this wants the directory of a run, found no {RUN_FILE} in {storage.root}")
    error = _read_json(storage, ERROR_FILE)
    metrics = last_report(storage)
    story = _Story()
    for line in read_lines(storage, TIMELINE_FILE):
        story.take(line)
    checkpoints = read_manifest(storage)
    holder = find_holder(storage)
    if holder is not None:
        status, story.ended = ("running" if holder.is_certain else "locked"), None
    elif story.outcome:
        status = story.outcome
    else:
        status = "failed" if error else "ended"
    kept = {checkpoint.name for checkpoint in checkpoints}
    times = [story.last_time, float((metrics or {}).get("_timestamp", 0)), *(entry.time for entry in checkpoints[-1:])]
    if not storage.is_local:
        began = float(facts.get("created", 0))
    else:
        began = float(facts.get("created") or os.stat(storage.path(RUN_FILE)).st_mtime)
    return RunRecord(
        name=str(facts.get("name") or os.path.basename(storage.root)),
        location=storage.root,
        status=status,
        holder=holder.description if holder else "",
        facts=facts,
        began=began,
        ended=story.ended,
        environment=story.environment,
        attempts=story.attempts,
        checkpoints=checkpoints,
        dropped=[entry for name, entry in story.committed.items() if name not in kept],
        error=error,
        error_line=story.error if status != "running" else "",
        metrics=metrics,
        last_time=max(times),
    )


class _Story:
    """What the lines of a timeline add up to."""

    def __init__(self) -> None:
        self.starts = 0
        self.environment: dict[str, Any] = {}
        self.attempts: list[Attempt] = []
        self.committed: dict[str, dict[str, Any]] = {}
        self.outcome = self.error = ""
        self.ended: float | None = None
        self.last_time = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        event, time = line.get("event"), float(line.get("time", 0))
        current = self.attempts[-1] if self.attempts else None
        if event == "start":
            self._close(self.last_time)  # of a driver that was killed
            self.starts += 1
            self.environment = {**line["environment"], "packages": {}}
            self.outcome, self.error, self.ended = "", "", None
        elif event == "packages":
            self.environment = {**self.environment, "packages": line["packages"]}
        elif event == "attempt":
            self._close(self.last_time)
            self.attempts.append(
                Attempt(start=self.starts, number=line["attempt"], began=time, workers=line["workers"])
            )
        elif event == "checkpoint":
            self.committed[line["name"]] = {key: line[key] for key in ("name", "iteration", "time")}
        elif event == "attempt end":
            self._close(time)
        elif event == "resume" and current is not None:
            current.resumed_from = line["iteration"] or None
        elif event == "failure" and current is not None:
            failure = {
                **line["failure"],
                "retrying": line["retrying"],
                "traceback": line["traceback"],
                "log": line["log"],
            }
            if failure.get("survived"):
                current.survived.append(failure)
            else:
                current.failure = failure
        elif event == "end":
            self.outcome, self.error, self.ended = line["outcome"], line["error"] or "", time
        self.last_time = max(self.last_time, time)

    def _close(self, time: float) -> None:
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended = max(time, self.attempts[-1].began)


def checkpoint_sizes(storage: Storage, name: str) -> tuple[int, int] | None:
    """Bytes and number of a committed checkpoint's files, by their list; None where it cannot be read."""
    data = storage.read_bytes(f"{name}/{LISTING_FILE}")
    if data is None:
        return None
    try:
        files, _ = parse_listing(data, name)
    except StorageError:
        return None
    return sum(file.size for file in files.values()), len(files)


def read_usage(storage: Storage) -> list[dict[str, Any]]:
    """What the workers used over time, each rank with parallel lists ``time``, ``cpus`` and ``bytes``.

    Of many samples those next to each other are put together: the mean of the CPUs, the greatest memory.
    """
    ranks: dict[int, list[tuple[float, float, int]]] = {}
    for line in read_lines(storage, USAGE_FILE):
        for rank, sample in line.get("ranks", {}).items():
            ranks.setdefault(int(rank), []).append((line["time"], sample[0], sample[1]))
    found = []
    for rank, samples in sorted(ranks.items()):
        width = math.ceil(len(samples) / _MAX_SAMPLES)
        groups = [samples[start : start + width] for start in range(0, len(samples), width)]
        found.append(
            {
                "rank": rank,
                "time": [group[-1][0] for group in groups],
                "cpus": [round(sum(sample[1] for sample in group) / len(group), 2) for group in groups],
                "bytes": [max(sample[2] for sample in group) for group in groups],
            }
        )
    return found


def _read_json(storage: Storage, name: str) -> Any:
    try:
        return json.loads(storage.read_bytes(name) or b"null")
    except ValueError:
        return None
