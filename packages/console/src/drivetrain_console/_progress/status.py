"""The state of a run, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.plugin.callbacks import writable

__all__ = ["MAX_METRICS", "Counter", "Metric", "Status", "clock", "short"]

MAX_METRICS = 6
"""The maximum number of metrics in one line."""

_QUIET_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counter:
    """A metric that counts the progress of the train function.

    Attributes:
        name: the name of the metric, such as ``epoch``.
        value: the reported value.
        done: the number of completed items.
        total: the total number of items; None if it is unknown.
    """

    name: str
    value: float
    done: float
    total: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A reported number.

    Attributes:
        name: the name of the metric.
        value: the last reported value.
        change: the difference from the previously shown value.
    """

    name: str
    value: Any
    change: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of a run at the moment when it is displayed.

    Attributes:
        name: the name of the run.
        state: a description of the run's workers and attempt, or of its current phase.
        elapsed_s: seconds since the start of the run.
        counters: the counters of the train function, coarsest first. If there are none, the number of reports is the
            counter.
        rate: the increase of the last counter per second; None while it is unknown.
        left_s: estimated seconds to the end; None while it cannot be estimated, for example without a total.
        fraction: the completed fraction of the total, 0 to 1; None if no total is known.
        metrics: the metrics that have changed at least once; before the first change, all metrics.
        checkpoint: the name of the last committed checkpoint; empty without one.
        checkpoint_age_s: seconds since the commit of that checkpoint.
        uploads: the number of checkpoints that have been reported but not committed.
        quiet_s: seconds since the last report.
    """

    name: str
    state: str
    elapsed_s: float
    counters: Sequence[Counter]
    rate: float | None
    left_s: float | None
    fraction: float | None
    metrics: Sequence[Metric]
    checkpoint: str
    checkpoint_age_s: float
    uploads: int
    quiet_s: float

    def parts(self) -> list[str]:
        """Return the parts of a single-line display."""
        parts = [self.state, *self.progress(), *map(metric_text, self.metrics[:MAX_METRICS]), *self.storage()]
        return [part for part in parts if part]

    def progress(self) -> list[str]:
        """Return the counters, their rate and the remaining time."""
        parts = [_counted(counter) for counter in self.counters]
        if self.rate is not None and self.counters:
            parts.append(_rate_text(self.rate, self.counters[-1].name))
        if self.left_s is not None:
            parts.append(f"{clock(self.left_s)} left")
        if self.quiet_s > _QUIET_S:
            parts.append(f"last report {clock(self.quiet_s)} ago")
        return parts

    def storage(self) -> list[str]:
        """Return the last committed checkpoint, and the number of uploads in flight."""
        parts = [self.checkpoint] if self.checkpoint else []
        if self.checkpoint and self.checkpoint_age_s >= 1:
            parts = [f"{self.checkpoint} {clock(self.checkpoint_age_s)} ago"]
        if self.uploads:
            parts.append(f"{self.uploads} upload{'s' if self.uploads > 1 else ''} in flight")
        return parts


def metric_text(metric: Metric) -> str:
    """Return the name, the value and the direction of the change of a metric."""
    return f"{metric.name} {short(metric.value)}{_arrow(metric.change)}"


def short(value: Any) -> str:
    """Return a value as a short text."""
    text = f"{value:.4g}" if isinstance(value, float) else str(writable(value))
    return text if len(text) <= 40 else f"{text[:39]}…"


def clock(seconds: float) -> str:
    """Return a duration as ``1:02``, or ``1:02:03`` from one hour."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _arrow(change: float) -> str:
    return " ↑" if change > 0 else " ↓" if change < 0 else ""


def _counted(counter: Counter) -> str:
    of = f"/{short(counter.total)}" if counter.total else ""
    return f"{counter.name} {short(counter.done if of else counter.value)}{of}"


def _rate_text(rate: float, name: str) -> str:
    return f"{rate:.3g} {name}s/s" if rate >= 1 else f"{1 / rate:.3g} s/{name}"
