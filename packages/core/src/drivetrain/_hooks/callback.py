"""Callbacks that observe a run on the controller, and the dispatcher that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain._base.failure import one_line
from drivetrain.errors import CallbackError

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["Callback", "Callbacks", "Report"]


class Report(NamedTuple):
    """A report of one rank, as passed to callbacks.

    Attributes:
        rank: the world rank that reported.
        iteration: the rank's number of reports in the run so far, including this one. A resumed run continues counting
            from its checkpoint.
        metrics: the reported metrics, combined over the ranks if the report requested that, and the metrics that
            drivetrain adds.
        checkpoint: the name of the reported checkpoint's directory in the run directory; None without a checkpoint. The
            checkpoint is committed later.
    """

    rank: int
    iteration: int
    metrics: dict[str, Any]
    checkpoint: str | None = None


class Callback:
    """Base class of callbacks, which observe a run on the controller. A hook does nothing unless it is overridden.

    Hooks are called one at a time, on the thread that called ``fit()``. A hook that raises fails the run: ``fit()``
    raises a :class:`~drivetrain.TrainingFailedError` whose cause is the hook's exception, or a
    :class:`~drivetrain.CallbackError` if the hook is ``on_run_end``. The order of the calls is::

        on_run_start(run)
        for each attempt:
            on_group_start(run, attempt, workers)
            on_resume(run, iteration)               except for the first attempt of a new run
            while the ranks report:
                on_report(run, report)              for every report of every rank, in each rank's order
                on_checkpoint(run, checkpoint)      for every commit
            on_group_stop(run, attempt)
            on_failure(run, failure, retrying)      if the attempt failed
        on_run_end(run, error)                      after success, failure and interruption
    """

    def on_run_start(self, run: Run) -> None:
        """Called when the run directory exists, before workers are started."""

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Called when the workers of an attempt are running.

        Args:
            run: the run.
            attempt: the number of the attempt, from 0.
            workers: the workers, by rank.
        """

    def on_resume(self, run: Run, iteration: int) -> None:
        """Called at the start of every attempt except the first one of a new run.

        Iterations after ``iteration`` that were reported before will be reported again.

        Args:
            run: the run.
            iteration: the iteration after which the attempt resumes; 0 if it starts from the beginning.
        """

    def on_report(self, run: Run, report: Report) -> None:
        """Called for each report of each rank."""

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Called for each committed checkpoint."""

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Called when an attempt has failed, or when lost ranks were replaced and the attempt continues.

        Args:
            run: the run.
            failure: the root cause.
            retrying: True if another attempt follows, or if the attempt continues.
        """

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """Called at the end of an attempt, before its workers are stopped."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called when the run has ended.

        Args:
            run: the run.
            error: the exception that ``fit()`` raises; None if the run succeeded.
        """


class Callbacks:
    """Calls the same hook of each callback in order. If one raises, the error names the callback and the hook."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._callbacks = tuple(callbacks)
        self._run = run
        self._on_report = [each.on_report for each in self._callbacks if not _is_default(each, "on_report")]

    def report(self, report: Report) -> None:
        """Call ``on_report`` of every callback. This is fast, because there may be thousands of reports per second."""
        for hook in self._on_report:
            try:
                hook(self._run, report)
            except Exception as error:
                raise _callback_error(getattr(hook, "__self__", hook), "on_report", error) from error

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback. The first exception skips the remaining callbacks."""
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self._run, *args)
            except Exception as error:
                raise _callback_error(callback, hook, error) from error

    def close(self, hook: str, *args: Any) -> CallbackError | None:
        """Call a closing hook of every callback, even if another callback raises.

        Returns:
            The first error, or None. The caller raises it unless an earlier error takes precedence.
        """
        first: CallbackError | None = None
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self._run, *args)
            except Exception as error:
                first = first or _callback_error(callback, hook, error)
                first.__cause__ = first.__cause__ or error
        return first


def _is_default(callback: Callback, hook: str) -> bool:
    """Return True if a callback does not override a hook, so that it need not be called."""
    return getattr(getattr(callback, hook), "__func__", None) is getattr(Callback, hook)


def _callback_error(callback: object, hook: str, error: Exception) -> CallbackError:
    name = type(callback).__qualname__
    return CallbackError(f"[DT-604] callback {name}.{hook}() raised {one_line(error)}")
