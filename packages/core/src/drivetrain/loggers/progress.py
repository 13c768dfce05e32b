"""How the run is doing: a few live lines on a terminal or in a notebook, a plain line now and then elsewhere."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain._base.outcome import outcome_of
from drivetrain._hooks.callback import Callback, Report
from drivetrain.errors import ConfigurationError
from drivetrain.loggers.standing import MAX_METRICS, Counter, Metric, Standing, short
from drivetrain.loggers.tracker import flatten

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["ProgressCallback"]

_REDRAW_S = 0.25
_REDRAW_IDLE_S = 1.0
_FIRST_PLAIN_S, _LAST_PLAIN_S = 30.0, 300.0
_END_WAIT_S = 2.0
_RATE_WINDOW = 60

# What a train function is seen to count with, and what its config calls the number that it counts to.
_COUNTERS = {
    "epoch": ("epochs", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs"),
    "step": ("steps", "num_steps", "max_steps", "total_steps", "num_train_steps"),
    "global_step": ("steps", "num_steps", "max_steps", "total_steps", "num_train_steps"),
    "iteration": ("iterations", "num_iterations", "max_iterations"),
}


class ProgressCallback(Callback):
    """Shows how the run is doing, on the standard error.

    On a terminal that is a small panel with ``rich``, one line without it; elsewhere a plain line every 30 seconds, and
    after a while every five minutes. The time that is left is shown where a total is known: given here, by
    ``RunConfig(stop={"step": ...})``, or in the train function's config as ``epochs``, ``num_epochs``, ``max_steps`` or
    the like, of what it reports as ``epoch``, ``step``, ``global_step`` or ``iteration``.

    Args:
        total: what a reported metric counts to, such as ``{"step": 4000}``.
        interval_s: seconds between two plain lines; None for the intervals above.

    Raises:
        ConfigurationError: an argument is not one that it takes.
    """

    def __init__(self, *, total: Mapping[str, float] | None = None, interval_s: float | None = None) -> None:
        numeric = isinstance(total, Mapping) and all(isinstance(value, (int, float)) for value in total.values())
        if total is not None and not numeric:
            raise ConfigurationError(f'ProgressCallback(total=...) wants such as {{"step": 4000}}, found {total!r}')
        if interval_s is not None and not interval_s > 0:
            raise ConfigurationError(f"ProgressCallback(interval_s=...) wants positive seconds, found {interval_s!r}")
        self.total = dict(total or {})
        self.interval_s = interval_s
        self._watch: _Watch | None = None

    def on_run_start(self, run: Run) -> None:
        """Says where the run is kept."""
        run.console.print(f"run directory: {run.location}", error=True)
        self._watch = _Watch(run, self.total, self.interval_s)

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Shows that workers are up."""
        if self._watch is not None:
            self._watch.begin_attempt(attempt, len(workers) if run.scaling_config.max_workers else 0)

    def on_resume(self, run: Run, iteration: int) -> None:
        """Notes where the run goes on."""
        if self._watch is not None:
            self._watch.committed_iteration = iteration

    def on_report(self, run: Run, report: Report) -> None:
        """Notes rank 0's metrics, and any rank's checkpoint."""
        if self._watch is not None:
            self._watch.note(report)

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Notes the checkpoint that was committed."""
        if self._watch is not None:
            self._watch.commit(checkpoint)

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Says that the run starts again, and why; the controller says so of one that goes on."""
        if failure.survived:
            run.console.print(failure.summary, error=True)
        elif retrying:
            run.console.print(f"{failure.summary}; starting again", error=True)

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """Forgets what the attempt had under way."""
        if self._watch is not None:
            self._watch.uploading.clear()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Leaves the last state as a line."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.finish(error)


class _Watch:
    """What is known of one run, and the thread that draws it."""

    def __init__(self, run: Run, totals: Mapping[str, float], interval_s: float | None) -> None:
        self._run = run
        self._console = run.console
        self._totals = totals
        self._interval_s = interval_s
        self._with_rich = importlib.util.find_spec("rich") is not None
        self._started = self._reported_at = time.monotonic()
        self._state = "starting"
        self._latest: Report | None = None
        self._shown: dict[str, float] = {}
        self._shown_iteration = -1
        self._metrics: list[Metric] = []
        self._changes: dict[str, float] = {}
        self._from_zero: set[str] = set()
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)
        self._base: tuple[float, float] | None = None
        self._checkpoint = ""
        self._committed_at = 0.0
        self.committed_iteration = 0
        self.uploading: set[str] = set()
        self._lock = threading.Lock()
        self._plain_at = self._started
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="drivetrain progress")
        self._thread.start()

    def begin_attempt(self, number: int, workers: int) -> None:
        """The workers of an attempt are up; 0 for this process."""
        count = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "in this process"
        with self._lock:
            self._state = count + (f", attempt {number + 1}" if number else "")
            self._samples.clear()
            self._base = None
            self.uploading.clear()
        if self._console.interactive or self._console.notebook:
            self._draw()
        else:
            self._plain()

    def note(self, report: Report) -> None:
        """A rank reported."""
        if report.checkpoint is not None and report.iteration > self.committed_iteration:
            self.uploading.add(report.checkpoint)
        if report.rank != 0:
            return
        self._from_zero |= {name for name in _COUNTERS if report.metrics.get(name) == 0}
        self._latest = report
        self._reported_at = time.monotonic()
        if self._run.run_config.verbose == 2:
            self._console.print(" | ".join(self._last_report()), error=True)

    def commit(self, checkpoint: CommittedCheckpoint) -> None:
        """A checkpoint was committed."""
        self.uploading.discard(checkpoint.name)
        self._checkpoint, self._committed_at = checkpoint.name, time.monotonic()
        self.committed_iteration = max(self.committed_iteration, checkpoint.iteration)

    def finish(self, error: BaseException | None) -> None:
        """Ends the drawing, and leaves a line."""
        self._ended.set()
        self._thread.join(_END_WAIT_S)
        self._console.status()
        self._state = f"{outcome_of(error).value} after {time.monotonic() - self._started:.1f} s"
        self.uploading.clear()
        self._console.print(" | ".join(self._last_report()), error=True)

    def _work(self) -> None:
        drawn_at, drawn = 0.0, -1
        while not self._ended.wait(_REDRAW_S):
            now = time.monotonic()
            iteration = self._latest.iteration if self._latest is not None else 0
            if self._console.interactive or self._console.notebook:
                if iteration != drawn or now - drawn_at >= _REDRAW_IDLE_S:
                    drawn_at, drawn = now, iteration
                    self._draw()
            elif now - self._plain_at >= self._plain_interval_s(now):
                self._plain()

    def _plain_interval_s(self, now: float) -> float:
        """A tenth of the time that the run has taken, within bounds: a night's log is not a thousand of these lines."""
        if self._interval_s is not None:
            return self._interval_s
        return min(max((now - self._started) / 10, _FIRST_PLAIN_S), _LAST_PLAIN_S)

    def _draw(self) -> None:
        standing = self._standing()
        if self._with_rich and self._console.interactive:
            from drivetrain.loggers.panel import render

            lines = render(standing, self._console.columns)
        else:
            lines = [" | ".join(standing.parts())]
        if not self._ended.is_set():
            self._console.status(*lines)

    def _plain(self) -> None:
        self._plain_at = time.monotonic()
        self._console.print(" | ".join(self._standing().parts()), error=True)

    def _last_report(self) -> list[str]:
        """The state, and the last report as it was, whether or not its metrics have moved."""
        parts = [self._state]
        if self._latest is not None:
            values = {name: value for name, value in self._latest.metrics.items() if not name.startswith("_")}
            parts.append(f"report {self._latest.iteration}")
            parts += [f"{name} {short(value)}" for name, value in list(values.items())[:MAX_METRICS]]
        return parts + ([self._checkpoint] if self._checkpoint else [])

    def _standing(self) -> Standing:
        with self._lock:
            now = time.monotonic()
            report = self._latest
            counters = self._counters(report) if report is not None else []
            if report is not None and report.iteration != self._shown_iteration:
                self._compare(report)
                self._samples.append((self._reported_at, counters[-1].done))
            rate = self._rate()
            left_s = fraction = None
            finest = next((counter for counter in reversed(counters) if counter.total), None)
            if finest is not None and finest.total:
                fraction = min(1.0, max(0.0, finest.done / finest.total))
                if rate and finest is counters[-1]:
                    left_s = max(0.0, finest.total - finest.done) / rate
                else:
                    left_s = self._extrapolate(now, fraction)
            return Standing(
                name=self._run.name,
                state=self._state,
                elapsed_s=now - self._started,
                counters=counters,
                rate=rate,
                left_s=left_s,
                fraction=fraction,
                metrics=self._metrics,
                checkpoint=self._checkpoint,
                checkpoint_age_s=now - self._committed_at,
                uploads=len(self.uploading),
                quiet_s=now - self._reported_at,
            )

    def _extrapolate(self, now: float, fraction: float) -> float | None:
        """Seconds to the end, if it goes on as it has since the first report of the attempt."""
        began, first = self._base = self._base or (now, fraction)
        return (now - began) * (1 - fraction) / (fraction - first) if fraction > first else None

    def _counters(self, report: Report) -> list[Counter]:
        found = []
        for name in dict.fromkeys((*_COUNTERS, *self._totals)):
            value = report.metrics.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            # A train function that has counted from 0 has done one more than its number says, if that is a whole one.
            done = value + (name in self._from_zero and isinstance(value, int))
            found.append(Counter(name=name, value=value, done=done, total=self._total(name)))
        if not found:
            total = self._total("training_iteration") or self._total("_training_iteration")
            found = [Counter(name="report", value=report.iteration, done=report.iteration, total=total)]
        return found

    def _total(self, name: str) -> float | None:
        if name in self._totals:
            return self._totals[name]
        stop, config = self._run.run_config.stop, self._run.train_loop_config or {}
        if isinstance(stop, Mapping) and name in stop:
            return stop[name]
        given = [config.get(known) for known in _COUNTERS.get(name, ())]
        return next((value for value in given if isinstance(value, (int, float)) and value > 0), None)

    def _compare(self, report: Report) -> None:
        """Finds the metrics that have moved since they were shown."""
        values = {
            name: value
            for name, value in flatten(report.metrics).items()
            if isinstance(value, (int, float)) and not name.startswith("_") and name not in _COUNTERS
        }
        if self._shown:
            self._changes |= {
                name: value - self._shown.get(name, value)
                for name, value in values.items()
                if name in self._changes or value != self._shown.get(name)
            }
        self._shown |= values
        moved = self._changes or dict.fromkeys(self._shown, 0.0)
        self._metrics = [Metric(name=name, value=self._shown[name], change=change) for name, change in moved.items()]
        self._shown_iteration = report.iteration

    def _rate(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None
