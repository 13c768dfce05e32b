"""Converts reports into entries for trackers, with flat metrics, for the ranks that a tracker logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from drivetrain.plugin import Report
from drivetrain.plugin.callbacks import reported_metrics

__all__ = ["Entries", "Entry", "Ranks"]

Ranks = Literal["rank0", "all", "reduced"]

_MAX_HELD = 1000
_AUTOFILLED = {"_training_iteration": "training_iteration", "_time_this_iter_s": "time_this_iter_s"}


class Entry(NamedTuple):
    """The values of one iteration that a tracker logs.

    Attributes:
        iteration: the iteration of the report, from 1.
        time: Unix time in seconds at which the driver received the report.
        metrics: the values by name, ``outer/inner`` for nested metrics; for ranks other than 0, names have the prefix
            ``rank_<n>/``.
    """

    iteration: int
    time: float
    metrics: dict[str, Any]


class Entries:
    """Creates the entries of one run.

    Args:
        ranks: see :class:`~drivetrain_track.TrackerCallback`.
        can_rewind: True if the tracker can remove iterations that will be reported again. For other trackers, the
            repeated reports are skipped.
    """

    def __init__(self, ranks: Ranks, *, can_rewind: bool) -> None:
        self._ranks = ranks
        self._can_rewind = can_rewind
        self._mean = _Mean()
        self._logged_before = 0
        self._last_of_rank: dict[int, int] = {}

    def skip(self, iteration: int) -> None:
        """Skip the iterations up to this one, because the tracker has received them from an earlier driver."""
        self._logged_before = iteration

    def regroup(self, size: int) -> list[Entry]:
        """Set the number of ranks that report from now on.

        Returns:
            The entries that were still waiting for reports of other ranks. They are removed.
        """
        held = self.flush()
        self._mean.size = size
        return held

    def rewind(self, iteration: int) -> None:
        """Expect iterations after this one to be reported again."""
        self._mean.last = iteration

    def flush(self) -> list[Entry]:
        """Remove and return the entries that are still waiting for reports of other ranks."""
        return self._mean.flush()

    def make(self, report: Report, time: float) -> Iterator[Entry]:
        """Yield the entries that are complete with this report."""
        if not self._can_rewind:
            if report.iteration <= self._last_of_rank.get(report.rank, self._logged_before):
                return
            self._last_of_rank[report.rank] = report.iteration
        values = _metrics_for_trackers(report.metrics)
        if self._ranks == "reduced":
            yield from self._mean.add(report.rank, Entry(report.iteration, time, values))
        elif report.rank:
            named = {f"rank_{report.rank}/{name}": value for name, value in values.items()}
            yield Entry(report.iteration, time, named)
        else:
            yield Entry(report.iteration, time, values)


class _Mean:
    """Computes the mean over the ranks of each metric in an iteration."""

    def __init__(self) -> None:
        self.size = 1
        self._held: dict[int, dict[int, Entry]] = {}
        self.last = 0

    def add(self, rank: int, entry: Entry) -> Iterator[Entry]:
        """Add the values of a rank, and yield the entry of an iteration that is complete.

        Some ranks may report less often than others, or not at all. When too many iterations are incomplete, the entry
        of the oldest one is yielded without the missing ranks, and values that arrive for it later are ignored.
        """
        if entry.iteration <= self.last:
            return
        ranks = self._held.setdefault(entry.iteration, {})
        ranks[rank] = entry
        if len(ranks) >= self.size:
            yield self._combine(entry.iteration)
        elif len(self._held) > _MAX_HELD:
            yield self._combine(min(self._held))

    def flush(self) -> list[Entry]:
        """Remove and return the entries of all incomplete iterations, without the missing ranks."""
        return [self._combine(iteration) for iteration in sorted(self._held)]

    def _combine(self, iteration: int) -> Entry:
        held = self._held.pop(iteration)
        self.last = iteration
        entries = [held[rank] for rank in sorted(held)]
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for entry in entries for name in entry.metrics):
            values = [entry.metrics[name] for entry in entries if name in entry.metrics]
            are_numbers = all(isinstance(value, (int, float)) for value in values)
            merged[name] = sum(values) / len(values) if are_numbers and len(values) > 1 else values[0]
        return Entry(iteration, entries[0].time, merged)


def _metrics_for_trackers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reported metrics, and those automatic metrics that trackers do not measure themselves."""
    return reported_metrics(metrics) | {new: metrics[name] for name, new in _AUTOFILLED.items() if name in metrics}
