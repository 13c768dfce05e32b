"""Makes entries for trackers from reports: flat metrics, of the ranks that a tracker is interested in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from drivetrain._base.metrics import reported_metrics
from drivetrain._hooks.callback import Report

__all__ = ["Entries", "Entry", "Ranks"]

Ranks = Literal["rank0", "all", "reduced"]

_MAX_HELD = 1000
_AUTOFILLED = {"_training_iteration": "training_iteration", "_time_this_iter_s": "time_this_iter_s"}


class Entry(NamedTuple):
    """What a tracker is to log for an iteration.

    Attributes:
        iteration: the report's, from 1.
        time: Unix time in seconds at which the driver has got the report.
        metrics: values by name, those of nested metrics as ``outer/inner``; those of ranks other than 0 have
            ``rank_<n>/`` in front.
    """

    iteration: int
    time: float
    metrics: dict[str, Any]


class Entries:
    """Makes the entries of one run.

    Args:
        ranks: whose reports become entries, and how.
        can_rewind: whether the tracker takes back iterations that are reported again. For others, the entries of
            these iterations are left out.
    """

    def __init__(self, ranks: Ranks, *, can_rewind: bool) -> None:
        self._ranks = ranks
        self._can_rewind = can_rewind
        self._mean = _Mean()
        self._logged_before = 0
        self._last_of_rank: dict[int, int] = {}

    def skip(self, iteration: int) -> None:
        """Leaves out iterations up to this one, which the tracker has from an earlier driver."""
        self._logged_before = iteration

    def regroup(self, size: int) -> list[Entry]:
        """Notes the number of ranks that report from now on, and returns the entries that were held."""
        held = self.flush()
        self._mean.size = size
        return held

    def rewind(self, iteration: int) -> None:
        """Expects that iterations after this one are reported again."""
        self._mean.last = iteration

    def flush(self) -> list[Entry]:
        """Returns the entries that wait for reports of other ranks."""
        return self._mean.flush()

    def make(self, report: Report, time: float) -> Iterator[Entry]:
        """Returns the entries that a report completes."""
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
    """The mean over ranks of what they report for the same iteration."""

    def __init__(self) -> None:
        self.size = 1
        self._held: dict[int, dict[int, Entry]] = {}
        self.last = 0

    def add(self, rank: int, entry: Entry) -> Iterator[Entry]:
        """Takes a rank's values, and gives those of iterations that are complete.

        Where some ranks report less often than others, or not at all, older iterations count as complete in time, and
        what comes for them later is left out.
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
        """The values of all iterations that some rank has reported."""
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
    """The reported metrics, and those autofilled metrics that a tracker does not measure itself."""
    return reported_metrics(metrics) | {new: metrics[name] for name, new in _AUTOFILLED.items() if name in metrics}
