"""Collects the information about a run that the progress display shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.plugin import Report
from drivetrain.plugin.callbacks import reported_metrics
from drivetrain.plugin.files import checkpoint_name
from drivetrain_console._progress.pace import COUNTERS, Pace
from drivetrain_console._progress.status import MAX_METRICS, Metric, Status, short

if TYPE_CHECKING:
    from drivetrain.plugin import Run
    from drivetrain.plugin.callbacks import CommittedCheckpoint

__all__ = ["Checkpoints", "Monitor"]


class Monitor:
    """The state of one run. The controller's thread writes it, and the display thread reads it.

    Args:
        run: the run.
        totals: the final values of metrics, if the user has given them, by metric.

    Attributes:
        state: a description of the workers and the attempt, or of the run's outcome.
        started: the monotonic time at which the run started.
        latest: the last report of rank 0; None before it.
        checkpoints: the last commit, and the uploads in flight.
    """

    def __init__(self, run: Run, totals: Mapping[str, float]) -> None:
        self.state = "starting"
        self.started = time.monotonic()
        self.latest: Report | None = None
        self.checkpoints = Checkpoints()
        self._name = run.name
        self._reported_at = self.started
        self._compared_iteration = -1
        self._pace = Pace(run, totals)
        self._changes = _Changes()
        self._lock = threading.Lock()

    def begin_attempt(self, state: str) -> None:
        """Record that the workers of an attempt have started."""
        with self._lock:
            self.state = state
            self._pace.restart()
            self.checkpoints.uploading.clear()

    def note(self, report: Report) -> None:
        """Record a report of rank 0."""
        self._pace.note(report)
        self.latest = report
        self._reported_at = time.monotonic()

    def status(self) -> Status:
        """Return the current state of the run. Changes of metrics are relative to the previously shown values."""
        with self._lock:
            now = time.monotonic()
            report = self.latest
            counters = self._pace.counters(report) if report is not None else []
            if report is not None and report.iteration != self._compared_iteration:
                self._compared_iteration = report.iteration
                self._changes.compare(report)
                self._pace.sample(self._reported_at, counters[-1])
            fraction, left_s = self._pace.remaining(counters, now)
            return Status(
                name=self._name,
                state=self.state,
                elapsed_s=now - self.started,
                counters=counters,
                rate=self._pace.rate(),
                left_s=left_s,
                fraction=fraction,
                metrics=self._changes.metrics,
                checkpoint=self.checkpoints.committed,
                checkpoint_age_s=now - self.checkpoints.committed_at,
                uploads=len(self.checkpoints.uploading),
                quiet_s=now - self._reported_at,
            )

    def last_report(self) -> list[str]:
        """Return the state, the last report and the last commit as parts of a line, including unchanged metrics."""
        parts = [self.state]
        if self.latest is not None:
            values = reported_metrics(self.latest.metrics)
            parts.append(f"report {self.latest.iteration}")
            parts += [f"{name} {short(value)}" for name, value in list(values.items())[:MAX_METRICS]]
        return parts + ([self.checkpoints.committed] if self.checkpoints.committed else [])


class Checkpoints:
    """The state of a run's checkpoints for the progress display.

    Attributes:
        committed: the last committed checkpoint: its name, and its iteration if that differs from the number in the
            name, as it does after a retry; empty without one.
        committed_at: the monotonic time of that commit.
        committed_iteration: the highest iteration with a committed checkpoint.
        uploading: the names of the checkpoints that have been reported but not committed.
    """

    def __init__(self) -> None:
        self.committed = ""
        self.committed_at = 0.0
        self.committed_iteration = 0
        self.uploading: set[str] = set()

    def note(self, report: Report) -> None:
        """Record a report of any rank."""
        if report.checkpoint is not None and report.iteration > self.committed_iteration:
            self.uploading.add(report.checkpoint)

    def commit(self, checkpoint: CommittedCheckpoint) -> None:
        """Record a committed checkpoint."""
        self.uploading.discard(checkpoint.name)
        name, iteration = checkpoint.name, checkpoint.iteration
        self.committed = name if name == checkpoint_name(iteration) else f"{name} of report {iteration}"
        self.committed_at = time.monotonic()
        self.committed_iteration = max(self.committed_iteration, checkpoint.iteration)


class _Changes:
    """The numbers in reports, without counters, and their changes since the last display.

    Attributes:
        metrics: the metrics that have changed at least once; before the first change, all metrics.
    """

    def __init__(self) -> None:
        self.metrics: list[Metric] = []
        self._values: dict[str, float] = {}
        self._changes: dict[str, float] = {}

    def compare(self, report: Report) -> None:
        """Update :attr:`metrics` from a new report."""
        values = {
            name: value
            for name, value in reported_metrics(report.metrics).items()
            if isinstance(value, (int, float)) and name not in COUNTERS
        }
        if self._values:
            self._changes |= {
                name: value - self._values.get(name, value)
                for name, value in values.items()
                if name in self._changes or value != self._values.get(name)
            }
        self._values |= values
        changes = self._changes or dict.fromkeys(self._values, 0.0)
        self.metrics = [Metric(name=name, value=self._values[name], change=change) for name, change in changes.items()]
