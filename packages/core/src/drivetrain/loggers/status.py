"""The state of a run, as facts and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MAX_METRICS", "Counter", "Metric", "Status", "clock", "short"]

MAX_METRICS = 6
"""How many metrics one line shows."""

_QUIET_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counter:
    """Something that the train function counts.

    Attributes:
        name: such as ``epoch``.
        value: as it was reported.
        done: how many are done.
        total: how many there will be; None if that is not known.
    """

    name: str
    value: float
    done: float
    total: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A number that was reported.

    Attributes:
        name: its name.
        value: the last one.
        change: its difference to the one that was shown before.
    """

    name: str
    value: Any
    change: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of a run at the moment at which it is drawn.

    Attributes:
        name: the run's name.
        state: its workers and attempt, or what it is at.
        elapsed_s: seconds since its start.
        counters: what the train function counts, coarsest first; without any, its reports.
        rate: how many of the last counter are done per second; None while that is not known.
        left_s: seconds to the end; None where no total is known.
        fraction: how much of the total is done, 0 to 1; None likewise.
        metrics: those that have moved, or all of the first report.
        checkpoint: the last one committed; empty without one.
        checkpoint_age_s: seconds since its commit.
        uploads: how many checkpoints are reported and not committed.
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
        """The parts of one line."""
        said = [self.state, *self.progress(), *map(metric_text, self.metrics[:MAX_METRICS]), *self.storage()]
        return [part for part in said if part]

    def progress(self) -> list[str]:
        """The counters, their rate, and the time left."""
        said = [_counted(counter) for counter in self.counters]
        if self.rate is not None and self.counters:
            said.append(_rate_text(self.rate, self.counters[-1].name))
        if self.left_s is not None:
            said.append(f"{clock(self.left_s)} left")
        if self.quiet_s > _QUIET_S:
            said.append(f"last report {clock(self.quiet_s)} ago")
        return said

    def storage(self) -> list[str]:
        """The last commit, and the uploads in flight."""
        said = [self.checkpoint] if self.checkpoint else []
        if self.checkpoint and self.checkpoint_age_s >= 1:
            said = [f"{self.checkpoint} {clock(self.checkpoint_age_s)} ago"]
        if self.uploads:
            said.append(f"{self.uploads} upload{'s' if self.uploads > 1 else ''} in flight")
        return said


def metric_text(metric: Metric) -> str:
    """A metric's name and value, and which way it went."""
    return f"{metric.name} {short(metric.value)}{_arrow(metric.change)}"


def short(value: Any) -> str:
    """A value in a few characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def clock(seconds: float) -> str:
    """A duration as ``1:02``, or ``1:02:03`` from an hour on."""
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
