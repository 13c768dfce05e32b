"""Detects ranks that have stopped making progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

from drivetrain._driver.ranks import Ranks
from drivetrain._wire.events import Draining, Event, PhaseEntered, PreemptionPolled, Progressed, RankState, Reported

__all__ = ["HangLimits", "Progress"]

_INTERVAL = 0.1
_LEARNED_INTERVAL_S = 1.0
_LEARNED_AFTER = 20
_LEARNED_FACTOR = 10.0
_LEARNED_MINIMUM_S = 60.0


class HangLimits(NamedTuple):
    """The time limits that ``RunConfig(hang_timeout_s=...)`` sets.

    Attributes:
        first_s: seconds until a rank makes progress for the first time in an attempt; None for no limit.
        next_s: seconds between two signs of progress of a rank; None for no limit.
        learns: True if the time between two signs of progress in this attempt determines the limit for this time.
    """

    first_s: float | None = None
    next_s: float | None = None
    learns: bool = False

    @classmethod
    def of(cls, value: float | str | Mapping[Literal["first", "next"], float | Literal["auto"]] | None) -> HangLimits:
        """Return the limits for a value of ``hang_timeout_s``."""
        if value is None:
            return cls()
        if value == "auto":
            return cls(learns=True)
        if isinstance(value, Mapping):
            following = value.get("next")
            learns = following == "auto"
            return cls(_seconds(value.get("first")), None if learns else _seconds(following), learns)
        return cls(_seconds(value), _seconds(value))

    @property
    def interval_s(self) -> float | None:
        """The interval in seconds at which a rank sends its progress; None if nothing limits the time."""
        limits = [limit for limit in (self.first_s, self.next_s) if limit is not None]
        intervals = [_INTERVAL * limit for limit in limits] + [_LEARNED_INTERVAL_S] * self.learns
        return min(intervals, default=None)


class Progress:
    """Records when each rank of an attempt last made progress.

    A rank is watched from its first report, heartbeat or poll on. Other ranks may leave the reports to rank 0 and never
    send anything. They count as stopped only if no rank at all sends anything. Time that the driver spends in callbacks
    does not count, nor does time before another rank starts its train function: a rank may wait for it. Progress may be
    noticed late by the interval at which ranks send it, so this interval is added to the limit.

    Args:
        ranks: the ranks of the attempt.
        limits: the time limits.
    """

    def __init__(self, ranks: Ranks, limits: HangLimits) -> None:
        self._ranks = ranks
        self._limits = limits
        self._interval_s = limits.interval_s or 0.0
        self._driver_s = 0.0  # seconds that the driver has spent in callbacks
        self._latest: dict[int, float] = {}  # by watched rank
        self._signs = 0
        self._longest_s = 0.0  # the longest time between two signs of progress of a rank
        self._latest_of_any = self._checked = self._now()

    @property
    def has_begun(self) -> bool:
        """True if a rank has made progress in this attempt."""
        return bool(self._latest)

    @property
    def limit_s(self) -> float | None:
        """The current limit in seconds; None if there is none."""
        if not self._latest:
            return self._limits.first_s
        if not self._limits.learns:
            return self._limits.next_s
        if self._signs < _LEARNED_AFTER:
            return None
        return max(_LEARNED_MINIMUM_S, _LEARNED_FACTOR * self._longest_s)

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
        if isinstance(event, PhaseEntered) and event.state is RankState.TRAINING:
            self._latest = dict.fromkeys(self._latest, now)
        before = self._latest.get(event.rank)
        if before is not None:
            self._signs += 1
            self._longest_s = max(self._longest_s, now - before)
        if before is not None or isinstance(event, (Reported, Progressed, PreemptionPolled)):
            self._latest[event.rank] = now

    def next_check(self) -> float | None:
        """Return the monotonic time in seconds before which no rank can have stopped; None if there is no limit."""
        limit = self.limit_s
        return None if limit is None else self._checked + limit + self._interval_s + self._driver_s

    def stopped(self) -> list[int]:
        """Return the ranks that have stopped, the first one first; empty if there are none.

        If a rank has stopped, so have those without progress for half of the limit, since they may wait for it.
        """
        limit = self.limit_s
        if limit is None:
            return []
        limit += self._interval_s
        training = (rank for rank in self._ranks.active if self._ranks[rank].state is RankState.TRAINING)
        watched = {rank: self._latest[rank] for rank in training if rank in self._latest}
        latest = watched or dict.fromkeys(self._ranks.active, self._latest_of_any)
        self._checked = min(latest.values(), default=self._now())
        now = self._now()
        if self._checked > now - limit:
            return []
        stopped = [rank for rank, moment in latest.items() if moment <= now - limit / 2]
        return sorted(stopped, key=lambda rank: (latest[rank], rank))

    def describe_limit(self) -> str:
        """Describe the limit that has passed, for a message."""
        is_learned = self._latest and self._limits.learns
        origin = (
            "10 times the longest time so far, RunConfig.hang_timeout_s" if is_learned else "RunConfig.hang_timeout_s"
        )
        return f"{self.limit_s or 0.0:.4g} s ({origin})"

    def _now(self) -> float:
        return time.monotonic() - self._driver_s


def _seconds(value: float | str | None) -> float | None:
    return None if value is None else float(value)
