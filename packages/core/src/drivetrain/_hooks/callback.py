"""What watches a run: callbacks on the controller, and the one dispatcher that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.errors import CallbackError

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["Callback", "Callbacks", "Report"]


class Report(NamedTuple):
    """A report as callbacks see it.

    Attributes:
        rank: who reported.
        iteration: the rank's number of reports in the run so far, this one included; a run that resumes goes on
            counting from its checkpoint.
        metrics: what was reported, with combined values where the report asked for them, and the autofilled ones.
        checkpoint: the directory of the checkpoint that came with it, which is committed later; None without one.
    """

    rank: int
    iteration: int
    metrics: dict[str, Any]
    checkpoint: str | None = None


class Callback:
    """Base of everything that watches a run from the controller. Every hook does nothing until it is overridden.

    Hooks are called one at a time, on the thread that called ``fit()``. One that raises fails the run: ``fit()``
    raises a :class:`~drivetrain.TrainingFailedError` whose cause is the hook's exception, or from ``on_run_end`` a
    :class:`~drivetrain.CallbackError`. When each hook is called::

        on_run_start(run)
        for each attempt:
            on_group_start(run, attempt, workers)
            on_resume(run, iteration)               unless it is the first of a new run
            while the ranks report:
                on_report(run, report)              for every report of every rank, in each rank's order
                on_checkpoint(run, checkpoint)      for every commit
            on_group_stop(run, attempt)
            on_failure(run, failure, retrying)      if the attempt failed
        on_run_end(run, error)                      however the run ended
    """

    def on_run_start(self, run: Run) -> None:
        """The run directory stands; nothing is started yet."""

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """The workers of an attempt are up; the first attempt is 0."""

    def on_resume(self, run: Run, iteration: int) -> None:
        """The attempt goes on after an iteration, 0 being the start; what was reported beyond it is made again."""

    def on_report(self, run: Run, report: Report) -> None:
        """A rank reported."""

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """A checkpoint was committed."""

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """An attempt failed; ``failure`` is its root cause."""

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """The workers of an attempt are being ended."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """The run is over; ``error`` is what ``fit()`` raises, if it does."""


class Callbacks:
    """Calls one hook of all callbacks in turn, and says whose hook it was that raised."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._callbacks = tuple(callbacks)
        self._run = run
        self._on_report = [callback.on_report for callback in self._callbacks]

    def report(self, report: Report) -> None:
        """Calls ``on_report``, the hook that may be called thousands of times a second."""
        for hook in self._on_report:
            try:
                hook(self._run, report)
            except Exception as error:
                raise _blame(getattr(hook, "__self__", hook), "on_report", error) from error

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of every callback; the first that raises ends the round."""
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self._run, *args)
            except Exception as error:
                raise _blame(callback, hook, error) from error

    def close(self, hook: str, *args: Any) -> CallbackError | None:
        """Calls a hook that ends something of every callback, whatever the others do.

        Returns:
            The first error, which the caller raises unless something else went wrong before.
        """
        first: CallbackError | None = None
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self._run, *args)
            except Exception as error:
                first = first or _blame(callback, hook, error)
                first.__cause__ = first.__cause__ or error
        return first


def _blame(callback: object, hook: str, error: Exception) -> CallbackError:
    name = type(callback).__qualname__
    return CallbackError(f"callback {name}.{hook}() raised {type(error).__name__}: {error}")
