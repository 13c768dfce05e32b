"""The base of callbacks that are told of all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain._hooks.callback import Callback, Report

if TYPE_CHECKING:
    from drivetrain._hooks.context import Run, WorkerInfo

__all__ = ["TrainingCallback"]

_AHEAD = 1000
_WAIT_S = 10.0


class TrainingCallback(Callback):
    """Base of callbacks that get the reports of all ranks side by side.

    Each hook does nothing until it is overridden, and is called on the driver. As no rank waits for another, an
    iteration is handled once every rank has reported it. Where a rank reports less often than others, it is handled
    with those that have: at the end of the run, or when they are a thousand iterations and ten seconds ahead. For
    hooks that are told of each report as it comes, and for what follows if one raises, see
    :class:`~drivetrain.Callback`.

    Example:
        >>> from drivetrain import Trainer, report
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
        """A run begins.

        Args:
            logdir: a local directory for what the callback writes: the run's, or one that is copied to it.
            config: the train function's.
            **info: for what later versions may add.
        """

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """An iteration was reported.

        Args:
            results: the metrics of each rank that has reported it, in the order of ranks.
            **info: for what later versions may add.
        """

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """The run is over.

        Args:
            error: whether it failed, or was interrupted.
            **info: for what later versions may add.
        """

    def on_run_start(self, run: Run) -> None:
        """Calls :meth:`start_training`."""
        self._waiting, self._handled = {}, 0
        self.start_training(str(run.path), dict(run.train_loop_config or {}))

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Notes how many ranks there are."""
        self._ranks, self._handled_at = len(workers), time.monotonic()

    def on_report(self, run: Run, report: Report) -> None:
        """Calls :meth:`handle_result` if the report is the last one of its iteration."""
        if report.iteration <= self._handled:  # without this rank
            return
        results = self._waiting.setdefault(report.iteration, {})
        results[report.rank] = report.metrics
        if len(results) == self._ranks:
            self._handle(through=report.iteration)
        elif len(self._waiting) > _AHEAD and time.monotonic() - self._handled_at > _WAIT_S:
            self._handle(through=report.iteration - _AHEAD)

    def on_resume(self, run: Run, iteration: int) -> None:
        """Forgets what will be reported again."""
        self._waiting.clear()
        self._handled = iteration

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Calls :meth:`handle_result` for what was not reported by all ranks, then :meth:`finish_training`."""
        self._handle(through=max(getattr(self, "_waiting", ()), default=0))
        self.finish_training(error=error is not None)

    def _handle(self, *, through: int) -> None:
        """Handles iterations in their order; ranks report in theirs, so nothing is missing from earlier ones."""
        while self._handled < through:
            self._handled += 1
            self._handled_at = time.monotonic()
            if (results := self._waiting.pop(self._handled, None)) is not None:
                self.handle_result([results[rank] for rank in sorted(results)])
