"""Matches the reports of all ranks by their number, without making any rank wait for another.

Only reports that need the other ranks are held: those with a checkpoint, which is complete when no rank can add
files any more, and those with values to combine. A held report is settled once every rank that takes part has made
as many reports or has finished. Where only some ranks ever report, the others must not hold their checkpoints back
until the end: a rank that has made no report at all, while another has gone on for two more reports and ten seconds,
counts as silent, and is not waited for until it reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from drivetrain._wire.events import Reported

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = ["MatchedReport", "ReportMatcher", "combine"]

_REDUCERS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}
_SILENT_REPORTS = 2
_SILENT_S = 10.0


@dataclass(slots=True)
class MatchedReport:
    """What all ranks reported under one number.

    Attributes:
        number: the number within the run.
        iteration: the iteration.
        metrics: each rank's metrics.
        files: the checkpoint files of each rank that had some, by relative path.
        uploading: the ranks whose files are still being uploaded.
        directories: the directory that each of those ranks named for the checkpoint.
        reduce: the combinations asked for.
    """

    number: int
    iteration: int
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: dict[int, dict[str, StoredFile]] = field(default_factory=dict)
    uploading: set[int] = field(default_factory=set)
    directories: dict[int, str] = field(default_factory=dict)
    reduce: dict[str, str] = field(default_factory=dict)
    held_from: float = 0.0


class ReportMatcher:
    """Holds the reports of one attempt that wait for other ranks.

    Args:
        world_size: number of ranks.
        last_number: the report number that the first reports follow.
        clock: a clock in seconds.
    """

    def __init__(self, world_size: int, last_number: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent: set[int] = set()
        self._first = last_number
        self._passed = dict.fromkeys(range(world_size), last_number)
        self._running = set(range(world_size))
        self._held: dict[int, MatchedReport] = {}

    def holds(self, number: int) -> bool:
        """Whether a report of that number or a smaller one waits for another rank."""
        return bool(self._held) and min(self._held) <= number

    def held(self, number: int) -> MatchedReport | None:
        """The report of that number, if it waits for another rank."""
        return self._held.get(number)

    def add(self, event: Reported) -> list[MatchedReport]:
        """Takes a rank's report, and returns what it settles, in order."""
        self._passed[event.rank] = event.number
        self._silent.discard(event.rank)
        if event.directory is None and not event.reduce:
            if not self._held:
                return []
            if (held := self._held.get(event.number)) is not None:
                held.metrics[event.rank] = event.metrics
            return self._settle()
        held = self._held.get(event.number)
        if held is None:
            held = self._held[event.number] = MatchedReport(event.number, event.iteration, held_from=self._clock())
        held.metrics[event.rank] = event.metrics
        held.iteration = min(held.iteration, event.iteration)
        if event.directory is not None:
            held.directories[event.rank] = event.directory
            if event.files is None:
                held.uploading.add(event.rank)
            else:
                held.files[event.rank] = event.files
        held.reduce.update(event.reduce or {})
        return self._settle()

    def finish(self, rank: int) -> list[MatchedReport]:
        """Notes that a rank will report no more, and returns what that settles, in order."""
        self._running.discard(rank)
        return self._settle()

    def restart(self, number: int) -> None:
        """Forgets what it holds, which will not be completed, and expects all ranks to go on from one number."""
        self._held.clear()
        self._silent.clear()
        self._first = number
        self._passed = dict.fromkeys(self._passed, number)
        self._running = set(self._passed)

    def _settle(self) -> list[MatchedReport]:
        self._note_silence()
        settled: list[MatchedReport] = []
        for number in sorted(self._held):
            if any(self._passed[rank] < number for rank in self._running - self._silent):
                break
            settled.append(self._held.pop(number))
        return settled

    def _note_silence(self) -> None:
        if not self._held:
            return
        oldest = min(self._held)
        went_on = max(self._passed.values()) >= oldest + _SILENT_REPORTS
        if went_on and self._clock() - self._held[oldest].held_from >= _SILENT_S:
            self._silent.update(rank for rank in self._running if self._passed[rank] == self._first)


def combine(reports: Mapping[int, Mapping[str, Any]], reduce: Mapping[str, str]) -> dict[str, float]:
    """Combines metrics over the ranks that reported them.

    Args:
        reports: metrics by rank.
        reduce: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` by metric.

    Returns:
        The combined value of each metric in ``reduce``.
    """
    combined: dict[str, float] = {}
    for key, how in reduce.items():
        values = [metrics[key] for _, metrics in sorted(reports.items()) if isinstance(metrics.get(key), (int, float))]
        combined[key] = _REDUCERS[how](values)
    return combined
