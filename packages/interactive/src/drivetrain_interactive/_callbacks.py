"""The base class of callbacks that receive the reports of all ranks together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain import Callback
from drivetrain.plugin import Report

if TYPE_CHECKING:
    from drivetrain.plugin import Run, WorkerInfo

__all__ = ["TrainingCallback"]

_MAX_AHEAD = 1000
_WAIT_S = 10.0


class TrainingCallback(Callback):
    """Base class of callbacks that receive the reports of all ranks for an iteration together.

    The hooks do nothing by default and are called on the driver. Ranks do not wait for each other, so an iteration is
    handled once every rank has reported it. If a rank reports less often than others, the iteration is handled without
    that rank: at the end of the run, or when the other ranks are more than a thousand iterations ahead and no iteration
    has been handled for ten seconds. For hooks that are called for each report immediately, and for the handling of
    exceptions in hooks, see :class:`~drivetrain.Callback`.

    Example:
        >>> from drivetrain_interactive import Trainer
        >>> from drivetrain import report
        >>> class Printing(TrainingCallback):
        ...     def handle_result(self, results, **info):
        ...         print([result["epoch"] for result in results])
        >>> def train_func():
        ...     for epoch in range(2):
        ...         report(epoch=epoch)
        >>> with Trainer("none", num_workers=2) as trainer:
        ...     _ = trainer.run(train_func, callbacks=[Printing()])
        [0, 0]
        [1, 1]
    """

    _ranks = 0
    _handled = 0
    _handled_at = 0.0
    _waiting: dict[int, dict[int, dict[str, Any]]]

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        """Called when a run starts.

        Args:
            logdir: a local directory for files of the callback: the run directory, or a directory that is copied to it.
            config: the config of the train function.
            **info: reserved for later versions.
        """

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called once for each iteration.

        Args:
            results: the metrics of each rank that has reported the iteration, in the order of ranks.
            **info: reserved for later versions.
        """

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Called when the run ends.

        Args:
            error: True if the run failed or was interrupted.
            **info: reserved for later versions.
        """

    def on_run_start(self, run: Run) -> None:
        """Call :meth:`start_training`."""
        self._waiting, self._handled = {}, 0
        self.start_training(str(run.path), dict(run.train_loop_config or {}))

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Record the number of ranks."""
        self._ranks, self._handled_at = len(workers), time.monotonic()

    def on_report(self, run: Run, report: Report) -> None:
        """Call :meth:`handle_result` if all ranks have now reported the iteration."""
        if report.iteration <= self._handled:  # the iteration was handled without this rank
            return
        results = self._waiting.setdefault(report.iteration, {})
        results[report.rank] = report.metrics
        if len(results) == self._ranks:
            self._handle(through=report.iteration)
        elif len(self._waiting) > _MAX_AHEAD and time.monotonic() - self._handled_at > _WAIT_S:
            self._handle(through=report.iteration - _MAX_AHEAD)

    def on_resume(self, run: Run, iteration: int) -> None:
        """Discard the iterations that will be reported again."""
        self._waiting.clear()
        self._handled = iteration

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Call :meth:`handle_result` for the remaining iterations, then :meth:`finish_training`."""
        self._handle(through=max(getattr(self, "_waiting", ()), default=0))
        self.finish_training(error=error is not None)

    def _handle(self, *, through: int) -> None:
        """Handle the iterations up to ``through``, in order.

        Each rank also reports in order, so when an iteration is complete, the earlier iterations are complete too.
        """
        while self._handled < through:
            self._handled += 1
            self._handled_at = time.monotonic()
            if (results := self._waiting.pop(self._handled, None)) is not None:
                self.handle_result([results[rank] for rank in sorted(results)])
