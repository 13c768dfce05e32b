"""Computes the progress, rate and remaining time of a train function from the counters in its reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain.plugin import Report
from drivetrain.plugin.callbacks import find_metric
from drivetrain_console._progress.status import Counter

if TYPE_CHECKING:
    from drivetrain.plugin import Run

__all__ = ["COUNTERS", "Pace"]

COUNTERS = {
    "epoch": ("epochs", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs"),
    "step": ("steps", "num_steps", "max_steps", "total_steps", "num_train_steps"),
    "global_step": ("steps", "num_steps", "max_steps", "total_steps", "num_train_steps"),
    "iteration": ("iterations", "num_iterations", "max_iterations"),
}
"""The metrics that are counters, coarsest first, each with names for its total in the config of a train function."""

_RATE_WINDOW = 60


class Pace:
    """Measures the progress of a run by the counters in the reports of rank 0.

    Args:
        run: the run, whose stop condition and train function's config may contain the totals of counters.
        totals: the totals that the user has given, by metric.
    """

    def __init__(self, run: Run, totals: Mapping[str, float]) -> None:
        self._run = run
        self._totals = totals
        self._counted_from_zero: set[str] = set()
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)
        self._first_fraction: tuple[float, float] | None = None

    def restart(self) -> None:
        """Discard the measurements of an earlier attempt."""
        self._samples.clear()
        self._first_fraction = None

    def note(self, report: Report) -> None:
        """Record which counters start at 0; must be called for every report of rank 0."""
        self._counted_from_zero |= {name for name in COUNTERS if report.metrics.get(name) == 0}

    def counters(self, report: Report) -> list[Counter]:
        """Return the counters in a report, coarsest first. If there are none, the number of reports is the counter."""
        counters = []
        for name in dict.fromkeys((*COUNTERS, *self._totals)):
            value = find_metric(report.metrics, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            # An integer counter that starts at 0 is one less than the number of completed items.
            done = value + (name in self._counted_from_zero and isinstance(value, int))
            counters.append(Counter(name=name, value=value, done=done, total=self._total(name)))
        if not counters:
            total = self._total("training_iteration") or self._total("_training_iteration")
            counters = [Counter(name="report", value=report.iteration, done=report.iteration, total=total)]
        return counters

    def sample(self, reported_at: float, counter: Counter) -> None:
        """Add a measurement of the finest counter, from which :meth:`rate` is computed."""
        self._samples.append((reported_at, counter.done))

    def rate(self) -> float | None:
        """Return the increase of the finest counter per second; None while it is unknown."""
        if len(self._samples) < 2:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None

    def remaining(self, counters: Sequence[Counter], now: float) -> tuple[float | None, float | None]:
        """Return the completed fraction and the remaining seconds; each is None while it is unknown."""
        finest = next((counter for counter in reversed(counters) if counter.total), None)
        if finest is None or not finest.total:
            return None, None
        fraction = min(1.0, max(0.0, finest.done / finest.total))
        rate = self.rate()
        if rate and finest is counters[-1]:
            return fraction, max(0.0, finest.total - finest.done) / rate
        return fraction, self._extrapolate(now, fraction)

    def _extrapolate(self, now: float, fraction: float) -> float | None:
        """Return the remaining seconds at the mean speed since the attempt's first report; None if that is unknown."""
        began, first = self._first_fraction = self._first_fraction or (now, fraction)
        return (now - began) * (1 - fraction) / (fraction - first) if fraction > first else None

    def _total(self, name: str) -> float | None:
        if name in self._totals:
            return self._totals[name]
        stop, config = self._run.run_config.stop, self._run.train_loop_config or {}
        if isinstance(stop, Mapping) and name in stop:
            return stop[name]
        candidates = [config.get(key) for key in COUNTERS.get(name, ())]
        return next((value for value in candidates if isinstance(value, (int, float)) and value > 0), None)
