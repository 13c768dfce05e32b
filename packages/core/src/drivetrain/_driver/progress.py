"""Detects ranks that have stopped making progress."""

from __future__ import annotations

import time

from drivetrain._driver.ranks import Ranks
from drivetrain._wire.events import Draining, Event, PreemptionPolled, Progressed, RankState, Reported

__all__ = ["PROGRESS_INTERVAL", "Progress"]

PROGRESS_INTERVAL = 0.1
"""The interval at which a rank sends its progress, as a fraction of the timeout."""


class Progress:
    """Records when each rank of an attempt last made progress.

    A rank is watched from its first report, heartbeat or poll on. Other ranks may leave the reports to rank 0 and never
    send anything. They count as stopped only if no rank at all sends anything. Time that the driver spends in callbacks
    does not count. Progress may be noticed late by the interval at which ranks send it, so this interval is added to
    the timeout.

    Args:
        ranks: the ranks of the attempt.
        timeout_s: seconds without progress after which a rank has stopped; None to watch no rank.
    """

    def __init__(self, ranks: Ranks, timeout_s: float | None) -> None:
        self._ranks = ranks
        self._timeout_s = None if timeout_s is None else timeout_s * (1 + PROGRESS_INTERVAL)
        self._driver_s = 0.0  # seconds that the driver has spent in callbacks
        self._latest: dict[int, float] = {}  # by watched rank
        self._latest_of_any = self._checked = self._now()

    def note(self, event: Event, seconds: float) -> None:
        """Record an event.

        Args:
            event: the event.
            seconds: the time that the driver has just spent on handling the event.
        """
        self._driver_s += seconds
        if isinstance(event, Draining):  # not an event of a rank
            return
        self._latest_of_any = now = self._now()
        if event.rank in self._latest or isinstance(event, (Reported, Progressed, PreemptionPolled)):
            self._latest[event.rank] = now

    def next_check(self) -> float | None:
        """Return the monotonic time in seconds before which no rank can have stopped; None if no rank is watched."""
        return None if self._timeout_s is None else self._checked + self._timeout_s + self._driver_s

    def stopped(self) -> list[int]:
        """Return the ranks that have stopped, the first one first; empty if there are none.

        If a rank has stopped, so have those without progress for half of the timeout, since they may wait for it.
        """
        if self._timeout_s is None:
            return []
        training = (rank for rank in self._ranks.active if self._ranks[rank].state is RankState.TRAINING)
        watched = {rank: self._latest[rank] for rank in training if rank in self._latest}
        latest = watched or dict.fromkeys(self._ranks.active, self._latest_of_any)
        self._checked = min(latest.values(), default=self._now())
        now = self._now()
        if self._checked > now - self._timeout_s:
            return []
        stopped = [rank for rank, moment in latest.items() if moment <= now - self._timeout_s / 2]
        return sorted(stopped, key=lambda rank: (latest[rank], rank))

    def _now(self) -> float:
        return time.monotonic() - self._driver_s
