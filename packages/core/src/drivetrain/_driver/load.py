"""Notices that the ranks report as fast as the driver can process the reports."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Load"]

_WINDOW_S = 10.0
_HIGH = 0.6
"""The share of the time that is high. Receiving reports takes the rest, or other processes that use the same cores."""

_FEW_REPORTS = 5


class Load:
    """Measures which share of the time the driver spends on reports, including the commits that they cause.

    Args:
        clock: returns the current time in seconds.
        cpu_clock: returns the CPU time of this thread in seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._is_known = False
        self._began_at, self._cpu_began_at = clock(), cpu_clock()
        self._busy_s = 0.0
        self._reports = 0

    def note(self, seconds: float) -> None:
        """Add a report.

        Args:
            seconds: the time that the driver has spent on it after it was received.
        """
        self._busy_s += seconds
        self._reports += 1

    def describe_if_high(self) -> str:
        """Return a message if the load of the last ten seconds was high, but only once; otherwise an empty text."""
        seconds = self._clock() - self._began_at
        if seconds < _WINDOW_S:
            return ""
        busy_s, reports = max(self._busy_s, self._cpu_clock() - self._cpu_began_at), self._reports
        self._began_at, self._cpu_began_at = self._clock(), self._cpu_clock()
        self._busy_s, self._reports = 0.0, 0
        if self._is_known or busy_s < _HIGH * seconds or reports < _FEW_REPORTS:
            return ""
        self._is_known = True
        return (
            f"[DT-432] report() waits for the driver: the ranks make {reports / seconds:,.1f} reports per second, each "
            f"of which takes {_duration(busy_s / reports)} with its callbacks, files and commits. Report less often"
        )


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} us" if seconds < 0.001 else f"{1e3 * seconds:,.1f} ms"
