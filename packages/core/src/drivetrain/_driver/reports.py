"""Matches the reports whose values are combined over all ranks by report number, without blocking any rank.

Reports with values to combine wait in the matcher. It releases a waiting report once every rank has made at least as
many reports, has finished, or counts as silent.

If only some ranks report, the other ranks must not delay the values until the end of the run. A rank therefore
counts as silent if it has not reported at all, although a report has been waiting for at least ten seconds and some
rank has made two more reports since. As soon as a silent rank reports, the matcher waits for that rank again.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from drivetrain._wire.events import Reported

__all__ = ["MatchedReport", "ReportMatcher", "combine"]

_REDUCERS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}
_SILENT_REPORTS = 2
_SILENT_S = 10.0


@dataclass(slots=True)
class MatchedReport:
    """The reports of all ranks with the same report number.

    Attributes:
        number: the report number within the run.
        metrics: the metrics of each rank.
        reduce: the requested reductions, by metric.
        waiting_since: the time in seconds at which the first of these reports arrived.
    """

    number: int
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    reduce: dict[str, str] = field(default_factory=dict)
    waiting_since: float = 0.0


class ReportMatcher:
    """Holds reports of one attempt until the other ranks have made the matching reports.

    Args:
        world_size: the number of ranks.
        last_number: the report number from which the ranks continue counting.
        clock: returns the current time in seconds.
    """

    def __init__(self, world_size: int, last_number: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._world_size = world_size
        self._waiting: dict[int, MatchedReport] = {}
        self._waiting_numbers: list[int] = []  # a heap
        self._expect_all(last_number)

    def _expect_all(self, last_number: int) -> None:
        """Wait for all ranks, which continue counting from ``last_number``."""
        self._latest = [last_number] * self._world_size
        self._highest = last_number
        self._awaited = set(range(self._world_size))
        self._unreported = set(self._awaited)  # the awaited ranks that have not reported
        self._silent: set[int] = set()
        self._behind = 0  # the number of awaited ranks that have not reached the oldest waiting report

    def waits_up_to(self, number: int) -> bool:
        """Return True if a report with this number or a smaller number waits for another rank."""
        return bool(self._waiting) and self._waiting_numbers[0] <= number

    def add(self, event: Reported) -> list[MatchedReport]:
        """Add the report of a rank; return the reports that this completes, ordered by number."""
        self._advance(event.rank, event.number)
        if not event.reduce:
            if not self._waiting:
                return []
            if (waiting := self._waiting.get(event.number)) is not None:
                waiting.metrics[event.rank] = event.metrics
            return self._release()
        waiting = self._waiting.get(event.number)
        if waiting is None:
            waiting = self._begin(event)
        waiting.metrics[event.rank] = event.metrics
        waiting.reduce.update(event.reduce)
        return self._release()

    def finish(self, rank: int) -> list[MatchedReport]:
        """Record that a rank will not report again; return the reports that this completes, ordered by number."""
        if rank in self._awaited and self._is_behind(rank):
            self._behind -= 1
        for ranks in (self._awaited, self._unreported, self._silent):
            ranks.discard(rank)
        return self._release()

    def restart(self, number: int) -> None:
        """Discard all waiting reports, which will not be completed. All ranks continue counting from ``number``."""
        self._waiting.clear()
        self._waiting_numbers.clear()
        self._expect_all(number)

    def _advance(self, rank: int, number: int) -> None:
        """Record the number of a rank's report. This takes constant time."""
        if rank in self._silent:
            self._silent.discard(rank)
            self._awaited.add(rank)
            self._behind += self._is_behind(rank)
        self._unreported.discard(rank)
        was_behind = self._is_behind(rank)
        self._latest[rank] = number
        self._highest = max(self._highest, number)
        if was_behind and not self._is_behind(rank):
            self._behind -= 1

    def _is_behind(self, rank: int) -> bool:
        return bool(self._waiting) and self._latest[rank] < self._waiting_numbers[0]

    def _begin(self, event: Reported) -> MatchedReport:
        """Make the reports with the number of this report wait."""
        waiting = self._waiting[event.number] = MatchedReport(event.number, waiting_since=self._clock())
        heapq.heappush(self._waiting_numbers, event.number)
        if self._waiting_numbers[0] == event.number:
            self._count_ranks_behind()
        return waiting

    def _release(self) -> list[MatchedReport]:
        """Release the reports that every awaited rank has reached.

        The cost is proportional to the number of ranks when a report is released, and constant otherwise.
        """
        self._note_silence()
        if not self._waiting or self._behind:
            return []
        reached = min((self._latest[rank] for rank in self._awaited), default=None)
        released: list[MatchedReport] = []
        while self._waiting_numbers and (reached is None or self._waiting_numbers[0] <= reached):
            released.append(self._waiting.pop(heapq.heappop(self._waiting_numbers)))
        self._count_ranks_behind()
        return released

    def _count_ranks_behind(self) -> None:
        self._behind = sum(self._is_behind(rank) for rank in self._awaited)

    def _note_silence(self) -> None:
        if not self._waiting or not self._unreported:
            return
        oldest = self._waiting_numbers[0]
        is_ahead = self._highest >= oldest + _SILENT_REPORTS
        if is_ahead and self._clock() - self._waiting[oldest].waiting_since >= _SILENT_S:
            self._silent |= self._unreported
            self._awaited -= self._unreported
            self._unreported.clear()
            self._count_ranks_behind()


def combine(reports: Mapping[int, Mapping[str, Any]], reduce: Mapping[str, str]) -> dict[str, float]:
    """Combine metrics over the ranks that reported them.

    Args:
        reports: the metrics of each rank.
        reduce: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, by metric.

    Returns:
        The combined value of each metric in ``reduce``.
    """
    combined: dict[str, float] = {}
    for key, reducer in reduce.items():
        values = [metrics[key] for _, metrics in sorted(reports.items()) if isinstance(metrics.get(key), (int, float))]
        combined[key] = _REDUCERS[reducer](values)
    return combined
