"""One line about how the run is doing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback, Report

if TYPE_CHECKING:
    from drivetrain.checkpoints import CommittedCheckpoint
    from drivetrain.context import Run, WorkerInfo
    from drivetrain.failure import Failure

__all__ = ["ProgressCallback"]

_REDRAW_S = 0.1
_PLAIN_S = 30.0
_MAX_METRICS = 6


class ProgressCallback(Callback):
    """Keeps one line up to date on a terminal; elsewhere prints one now and then, and one per checkpoint."""

    def __init__(self) -> None:
        self._state = ""
        self._drawn_at = float("-inf")
        self._started = time.monotonic()
        self._latest: Report | None = None
        self._checkpoint = ""
        self._pending = False

    def on_run_start(self, run: Run) -> None:
        """Says where the run is kept."""
        self._started = time.monotonic()
        run.console.print(f"run directory: {run.location}", error=True)

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Shows that workers are up."""
        count = len(workers) if run.scaling_config.max_workers else 0
        workers_text = f"{count} worker{'s' if count > 1 else ''}" if count else "in this process"
        self._state = workers_text + (f", attempt {attempt + 1}" if attempt else "")
        self._draw(run, force=run.console.interactive)

    def on_report(self, run: Run, report: Report) -> None:
        """Shows rank 0's metrics."""
        if report.rank == 0:
            self._latest = report
            if run.run_config.verbose == 2:
                run.console.print(self._text(), error=True)
            else:
                self._draw(run)

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Shows the checkpoint that was committed."""
        self._checkpoint = checkpoint.name
        self._draw(run)

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Says that the run starts again, and why."""
        if retrying:
            run.console.print(f"{failure.summary}; starting again", error=True)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Leaves the last state as a line."""
        run.console.status("")
        word = "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._state = f"{word} after {time.monotonic() - self._started:.1f} s"
        run.console.print(self._text(), error=True)

    def _draw(self, run: Run, *, force: bool = False) -> None:
        now = time.monotonic()
        interval_s = _REDRAW_S if run.console.interactive else _PLAIN_S
        if not force and now - self._drawn_at < interval_s:
            return
        self._drawn_at = now
        if run.console.interactive:
            run.console.status(self._text())
        else:
            run.console.print(self._text(), error=True)

    def _text(self) -> str:
        parts = [self._state]
        if self._latest is not None:
            parts.append(f"report {self._latest.iteration}")
            shown = [(name, value) for name, value in self._latest.metrics.items() if not name.startswith("_")]
            parts += [f"{name} {_short(value)}" for name, value in shown[:_MAX_METRICS]]
        if self._checkpoint:
            parts.append(self._checkpoint)
        return " | ".join(parts)


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
