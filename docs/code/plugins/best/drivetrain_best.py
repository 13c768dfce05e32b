"""A callback that prints a line whenever a metric reaches its best value so far."""

import math

from drivetrain import Callback, ConfigurationError
from drivetrain.plugin import Report, Run


class BestValue(Callback):
    """Print the new best values of a metric of rank 0.

    Args:
        metric: the name of the metric.
        mode: "min" if lower values are better, "max" if higher ones are.
    """

    def __init__(self, metric: str = "loss", mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(
                f"BestValue(mode=...): expected 'min' or 'max', got {mode!r}"
            )
        self.metric = metric
        self.sign = 1 if mode == "min" else -1

    def on_run_start(self, run: Run) -> None:
        """Forget earlier runs: the same object may serve several of them."""
        self.best = math.inf

    def on_report(self, run: Run, report: Report) -> None:
        """Compare the new value with the best one."""
        value = report.metrics.get(self.metric)
        if report.rank == 0 and value is not None and self.sign * value < self.best:
            self.best = self.sign * value
            run.console.print(f"{run.name}: best {self.metric} so far: {value:g}")
