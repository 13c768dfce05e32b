"""Selects the reports that a logger writes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

from drivetrain._hooks.callback import Report
from drivetrain._storage.reading import is_number
from drivetrain.errors import ConfigurationError

__all__ = ["Selection"]


class Selection:
    """Selects reports by their rank and iteration, and by the time since the last selected report of the rank.

    Args:
        logger: the name of the logger, for error messages.
        ranks: the ranks whose reports are selected, or ``"all"``.
        every: select every n-th report of a rank: those whose iteration is divisible by it.
        min_interval_s: the minimum number of seconds between two selected reports of a rank.
        clock: returns the current time in seconds.

    Attributes:
        selects_all: True if every report is selected. Loggers check it first, because that takes no call.

    Raises:
        ConfigurationError: an argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        logger: str,
        ranks: Collection[int] | Literal["all"],
        every: int,
        min_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ranks != "all" and not _are_ranks(ranks):
            raise ConfigurationError(f"{logger}(ranks=...): expected 'all' or a list of ranks, got {ranks!r}")
        if type(every) is not int or every < 1:
            raise ConfigurationError(f"{logger}(every=...): expected an integer of at least 1, got {every!r}")
        if not is_number(min_interval_s) or min_interval_s < 0:
            raise ConfigurationError(f"{logger}(min_interval_s=...): expected seconds, got {min_interval_s!r}")
        self._ranks = None if ranks == "all" else frozenset(ranks)
        self._every = every
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._selected_at: dict[int, float] = {}
        self._skipped: dict[int, Report] = {}
        self.selects_all = self._ranks is None and every == 1 and not min_interval_s

    def selects(self, report: Report) -> bool:
        """Return True if a report must be written."""
        if self.selects_all:
            return True
        if self._ranks is not None and report.rank not in self._ranks:
            return False
        is_due = True
        if self._min_interval_s:
            is_due = self._clock() - self._selected_at.get(report.rank, -math.inf) >= self._min_interval_s
        if report.iteration % self._every or not is_due:
            self._skipped[report.rank] = report
            return False
        if self._min_interval_s:
            self._selected_at[report.rank] = self._clock()
        self._skipped.pop(report.rank, None)
        return True

    def take_last(self) -> Iterator[Report]:
        """Yield the last report of each selected rank whose last report was not selected, since the last call.

        A logger writes them at the end of a run, so that its files end with the last metrics of the run.
        """
        while self._skipped:
            yield self._skipped.popitem()[1]

    def restart(self) -> None:
        """Forget the reports so far, because a run resumes from an earlier iteration."""
        self._skipped.clear()
        self._selected_at.clear()


def _are_ranks(ranks: object) -> bool:
    if isinstance(ranks, (str, Mapping)) or not isinstance(ranks, Collection):
        return False
    return all(type(rank) is int and rank >= 0 for rank in ranks)
