"""Warns of metrics that the configuration names, but no rank reports: usually a typo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain._base.closest import closest
from drivetrain._base.metrics import AUTOMATIC, flatten, has_metric, reported_metrics
from drivetrain._hooks.callback import Callback, Report

if TYPE_CHECKING:
    from drivetrain._hooks.context import Run
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["MissingMetrics"]

_MAX_NAMES = 10
_STOP = "RunConfig(stop=...)"
_SCORE = "CheckpointConfig(checkpoint_score_attribute=...)"


class MissingMetrics(Callback):
    """Prints a warning for each metric of ``stop`` or ``checkpoint_score_attribute`` that is not reported.

    The warning is printed after the first checkpoint for the score, and after the first report of rank 0 for ``stop``.
    """

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}  # a mapping from metrics to the option that names them
        self._reported: set[str] = set()

    def on_run_start(self, run: Run) -> None:
        """Collect the metrics that the configuration names."""
        stop, score = run.run_config.stop, run.run_config.checkpoint_config.checkpoint_score_attribute
        names = stop if isinstance(stop, Mapping) else ()
        self._missing = {name: _STOP for name in names if name not in AUTOMATIC and f"_{name}" not in AUTOMATIC}
        if score is not None:
            self._missing[score] = _SCORE
        self._reported.clear()

    def on_report(self, run: Run, report: Report) -> None:
        """Note the reported metrics until nothing is missing, and warn if the first report has no metric to stop by."""
        if self._missing:
            self._note(report.metrics)
        if report.rank == 0 and self._missing:
            self._warn(
                run, [name for name, option in self._missing.items() if option == _STOP], "the first report has no"
            )

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Warn if the checkpoint has no score."""
        self._note(checkpoint.metrics)
        self._warn(run, [name for name, option in self._missing.items() if option == _SCORE], "no rank has reported")

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Warn of the metrics that are still missing."""
        if self._reported:
            self._warn(run, list(self._missing), "no rank has reported")

    def _note(self, metrics: Mapping[str, object]) -> None:
        self._missing = {name: option for name, option in self._missing.items() if not has_metric(metrics, name)}
        if self._missing:
            self._reported |= flatten(reported_metrics(dict(metrics))).keys()

    def _warn(self, run: Run, names: Sequence[str], problem: str) -> None:
        for name in names:
            option = self._missing.pop(name)
            meant = closest(name, self._reported)
            known = sorted(self._reported)
            shown = ", ".join(map(repr, known[:_MAX_NAMES])) + (", ..." if len(known) > _MAX_NAMES else "")
            hint = f"Did you mean {meant!r}?" if meant else f"Reported: {shown or 'nothing'}"
            run.console.print(f"{run.name}: {option}: {problem} {name!r}. {hint}", error=True)
