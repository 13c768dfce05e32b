"""Shows the progress of a run: live lines on a terminal or in a notebook, occasional plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain import Callback, ConfigurationError
from drivetrain.plugin import Report
from drivetrain.plugin.callbacks import outcome_of
from drivetrain_console._progress.monitor import Monitor

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run, WorkerInfo
    from drivetrain.plugin.callbacks import CommittedCheckpoint, Console

__all__ = ["ProgressCallback"]

_REDRAW_S = 0.25
_REDRAW_IDLE_S = 1.0
_FIRST_PLAIN_S, _LAST_PLAIN_S = 30.0, 300.0
_END_WAIT_S = 2.0


class ProgressCallback(Callback):
    """Shows the progress of a run on standard error.

    On a terminal, it draws a small panel if ``rich`` is installed, and a single line otherwise. If standard error is
    not a terminal or notebook, it prints a plain line, at first every 30 seconds, later in long runs every five
    minutes. It shows the remaining time if the train function reports ``epoch``, ``step``, ``global_step`` or
    ``iteration`` and the total of that metric is known: from ``total``, from ``RunConfig(stop={"step": ...})``, or from
    the train function's config, where it is named ``epochs``, ``num_epochs``, ``max_steps`` or similarly.

    Args:
        total: the final values of reported metrics, such as ``{"step": 4000}``.
        interval_s: seconds between two plain lines; None for the intervals above.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(self, *, total: Mapping[str, float] | None = None, interval_s: float | None = None) -> None:
        numeric = isinstance(total, Mapping) and all(isinstance(value, (int, float)) for value in total.values())
        if total is not None and not numeric:
            raise ConfigurationError(
                f'ProgressCallback(total=...): expected a mapping such as {{"step": 4000}}, got {total!r}'
            )
        if interval_s is not None and not interval_s > 0:
            raise ConfigurationError(
                f"ProgressCallback(interval_s=...): expected a positive number of seconds, got {interval_s!r}"
            )
        self.total = dict(total or {})
        self.interval_s = interval_s
        self._monitor: Monitor | None = None
        self._display: _Display | None = None

    def on_run_start(self, run: Run) -> None:
        """Print the run directory and start the display."""
        run.console.print(f"run directory: {run.location}", error=True)
        self._monitor = Monitor(run, self.total)
        self._display = _Display(self._monitor, run.console, self.interval_s)

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Show that the workers have started."""
        if self._monitor is None or self._display is None:
            return
        count = len(workers) if run.scaling_config.max_workers else 0
        state = f"{count} worker{'s' if count > 1 else ''}" if count else "in this process"
        self._monitor.begin_attempt(state + (f", attempt {attempt}" if attempt else ""))
        self._display.show()

    def on_resume(self, run: Run, iteration: int) -> None:
        """Record the iteration after which the run resumes."""
        if self._monitor is not None:
            self._monitor.checkpoints.committed_iteration = iteration

    def on_report(self, run: Run, report: Report) -> None:
        """Record the metrics of rank 0, and the checkpoint of any rank."""
        if self._monitor is None:
            return
        self._monitor.checkpoints.note(report)
        if report.rank == 0:
            self._monitor.note(report)
            if run.run_config.verbose == 2:
                run.console.print(" | ".join(self._monitor.last_report()), error=True)

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Record the committed checkpoint."""
        if self._monitor is not None:
            self._monitor.checkpoints.commit(checkpoint)

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Print a failure that is retried, or that the run survived."""
        if failure.survived:
            run.console.print(failure.summary, error=True)
        elif retrying:
            run.console.print(f"{failure.summary}; retrying", error=True)

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """Discard the pending uploads of the attempt."""
        if self._monitor is not None:
            self._monitor.checkpoints.uploading.clear()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Stop the display, and print the outcome with the last report."""
        monitor, self._monitor = self._monitor, None
        display, self._display = self._display, None
        if monitor is not None and display is not None:
            display.close()
            monitor.state = f"{outcome_of(error).value} after {time.monotonic() - monitor.started:.1f} s"
            run.console.print(" | ".join(monitor.last_report()), error=True)


class _Display:
    """Shows the status from a separate thread: live if the console can redraw lines, as plain lines otherwise."""

    def __init__(self, monitor: Monitor, console: Console, interval_s: float | None) -> None:
        self._monitor = monitor
        self._console = console
        self._interval_s = interval_s
        self._with_rich = importlib.util.find_spec("rich") is not None
        self._printed_at = monitor.started
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="drivetrain progress")
        self._thread.start()

    def show(self) -> None:
        """Show the status now."""
        if self._is_live:
            self._draw()
        else:
            self._print()

    def close(self) -> None:
        """Stop the thread and remove the live lines."""
        self._ended.set()
        self._thread.join(_END_WAIT_S)
        self._console.status()

    @property
    def _is_live(self) -> bool:
        return self._console.interactive or self._console.notebook

    def _work(self) -> None:
        drawn_at, drawn = 0.0, -1
        while not self._ended.wait(_REDRAW_S):
            now = time.monotonic()
            latest = self._monitor.latest
            iteration = latest.iteration if latest is not None else 0
            if self._is_live:
                if iteration != drawn or now - drawn_at >= _REDRAW_IDLE_S:
                    drawn_at, drawn = now, iteration
                    self._draw()
            elif now - self._printed_at >= self._plain_interval_s(now):
                self._print()

    def _plain_interval_s(self, now: float) -> float:
        """Return the seconds between plain lines: a tenth of the run's age, within bounds, to keep the log short."""
        if self._interval_s is not None:
            return self._interval_s
        return min(max((now - self._monitor.started) / 10, _FIRST_PLAIN_S), _LAST_PLAIN_S)

    def _draw(self) -> None:
        status = self._monitor.status()
        if self._with_rich and self._console.interactive:
            from drivetrain_console._progress.panel import render

            lines = render(status, self._console.columns)
        else:
            lines = [" | ".join(status.parts())]
        if not self._ended.is_set():
            self._console.status(*lines)

    def _print(self) -> None:
        self._printed_at = time.monotonic()
        self._console.print(" | ".join(self._monitor.status().parts()), error=True)
