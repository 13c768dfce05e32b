"""Reads what the observers have recorded, and joins the attempts of each rank: see :class:`JobEvents`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Batch", "JobEvents", "Probe", "read_events"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that a rank has read.

    Attributes:
        epoch: the number of epochs that the rank had begun, as far as its batches show it.
        number: the number of the batch in its epoch.
        repeated: the number of rows at its end that are repetitions.
        rows: the digest of each row.
    """

    epoch: int
    number: int
    repeated: int
    rows: tuple[str, ...]

    @property
    def own_rows(self) -> tuple[str, ...]:
        """The rows without the repetitions."""
        return self.rows[: len(self.rows) - self.repeated]


@dataclass(frozen=True, slots=True)
class Probe:
    """The state that a rank held at a moment: see :mod:`drivetrain_testing._prove.probe`."""

    holds: dict[str, str]
    carried: tuple[str, ...] = ()


@dataclass
class JobEvents:
    """The events of a job, without those that a kill has undone.

    When a run resumes from the checkpoint of report ``i``, everything that a rank did after its report ``i`` is
    repeated. So the joined record of a rank consists of its events up to report ``i`` in the earlier attempts, and of
    all events of the last attempt. Batches and probes have as their key the report that precedes them.

    Attributes:
        batches: for each rank, the batches that it read after each report.
        reports: for each rank, the time of each report in seconds of the monotonic clock.
        probes: for each rank, iteration and kind of moment, what it held.
        starts: for each rank, the iterations from which its attempts started.
        size: the number of workers of the last attempt.
        shuffles: whether a loader of PyTorch shuffles.
    """

    batches: dict[int, dict[int, list[Batch]]] = field(default_factory=dict)
    reports: dict[int, dict[int, float]] = field(default_factory=dict)
    probes: dict[tuple[int, int, str], Probe] = field(default_factory=dict)
    starts: dict[int, list[int]] = field(default_factory=dict)
    size: int = 0
    shuffles: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether a loader has shown its batches."""
        return any(batches for of_rank in self.batches.values() for batches in of_rank.values())

    def order(self, rank: int, iteration: int) -> list[str]:
        """Return the rows that a rank read after a report, in order."""
        return [row for batch in self.batches.get(rank, {}).get(iteration, []) for row in batch.rows]

    @property
    def repeats_its_order(self) -> bool:
        """Whether a loader shuffles, but every epoch of rank 0 reads the same rows in the same order."""
        epochs: dict[int, list[str]] = {}
        for batches in self.batches.get(0, {}).values():
            for batch in batches:
                epochs.setdefault(batch.epoch, []).extend(batch.rows)
        orders = list(epochs.values())
        return self.shuffles and len(orders) > 1 and all(order == orders[0] for order in orders)

    def multiset(self, iteration: int | None = None) -> Counter[str]:
        """Return the rows that all ranks read after a report, or in the whole run, without repetitions."""
        return Counter(
            row
            for of_rank in self.batches.values()
            for key, batches in of_rank.items()
            if iteration is None or key == iteration
            for batch in batches
            for row in batch.own_rows
        )

    def interval_s(self, rank: int, iteration: int) -> float:
        """Return the seconds between a report of a rank and its next one; 0 if there is no next one."""
        reports = self.reports.get(rank, {})
        return max(0.0, reports.get(iteration + 1, 0.0) - reports.get(iteration, 0.0))


def read_events(directory: Path) -> JobEvents:
    """Read the files of all observers of a job."""
    joined = JobEvents()
    files = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.name.split("-")[1]))
    for path in files:
        rank = int(path.name.split("-")[0].removeprefix("rank"))
        _join(joined, rank, _lines(path))
    return joined


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # a killed process may have written a part of its last line
            yield json.loads(line)


def _join(joined: JobEvents, rank: int, events: Iterator[dict[str, Any]]) -> None:
    """Add the events of an attempt, or of what remains of it after ranks were lost."""
    batches, reports = joined.batches.setdefault(rank, {}), joined.reports.setdefault(rank, {})
    current = epoch = 0
    for event in events:
        match event["event"]:
            case "start":
                current = event["iteration"]
                joined.size = event.get("size", joined.size)
                joined.starts.setdefault(rank, []).append(current)
                for other in [rank, *(each for each in joined.batches if each >= joined.size)]:
                    _undo(joined, other, current)
                epoch = max((each.epoch for of_report in batches.values() for each in of_report), default=0)
            case "shuffle":
                joined.shuffles = True
            case "batch":
                epoch += event["number"] == 0
                rows = tuple(event["rows"])
                batches.setdefault(current, []).append(Batch(epoch, event["number"], event["repeated"], rows))
            case "report":
                current = event["iteration"]
                reports[current] = event["time"]
            case "probe":
                probe = Probe(event["holds"], tuple(event.get("carried", ())))
                joined.probes[rank, event["iteration"], event["at"]] = probe


def _undo(joined: JobEvents, rank: int, iteration: int) -> None:
    """Remove what a rank did after a report, because the run has resumed from this report's checkpoint."""
    for key in [key for key in joined.batches.get(rank, {}) if key >= iteration]:
        del joined.batches[rank][key]
    for key in [key for key in joined.reports.get(rank, {}) if key > iteration]:
        del joined.reports[rank][key]
    for at in [at for at in joined.probes if at[0] == rank and _is_after(at, iteration)]:
        del joined.probes[at]


def _is_after(at: tuple[int, int, str], iteration: int) -> bool:
    return at[1] > iteration if at[2] == "report" else at[1] >= iteration
