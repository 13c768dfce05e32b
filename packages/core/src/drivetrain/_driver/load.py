"""Notices that the ranks report as fast as the driver can process the reports."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Load"]

_WINDOW_S = 10.0
_HIGH = 0.5
"""The share of the time spent in callbacks that is high, because to receive the reports takes most of the rest."""

_FEW_REPORTS = 100


class Load:
    """Measures which share of the time the driver spends on reports.

    Args:
        clock: returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._busy_s = 0.0
        self._reports = 0
        self._is_known = False

    def note(self, seconds: float) -> None:
        """Add a report.

        Args:
            seconds: the time that the driver has spent on it.
        """
        self._busy_s += seconds
        self._reports += 1

    def describe_if_high(self) -> str:
        """Return a message if the load of the last ten seconds was high, but only once; otherwise an empty text."""
        seconds = self._clock() - self._began_at
        if seconds < _WINDOW_S:
            return ""
        busy_s, reports = self._busy_s, self._reports
        self._began_at, self._busy_s, self._reports = self._clock(), 0.0, 0
        if self._is_known or busy_s < _HIGH * seconds or reports < _FEW_REPORTS:
            return ""
        self._is_known = True
        return (
            f"[DT-432] report() waits for the driver: the ranks make {reports / seconds:,.0f} reports per second, and "
            f"callbacks and files take {1e6 * busy_s / reports:,.0f} us for each. Report less often"
        )
