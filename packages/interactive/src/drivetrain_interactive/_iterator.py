"""An iterator over the results of a run while it is running."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from drivetrain import Result, RunHandle, SessionError
from drivetrain.plugin.sessions import Interrupts
from drivetrain_interactive._callbacks import TrainingCallback

__all__ = ["Feed", "TrainingIterator"]

_MAX_AHEAD = 16
_END_WAIT_S = 60.0


class Feed(TrainingCallback):
    """Passes results from the thread of the run to the iterator; the run waits if it is too far ahead."""

    def __init__(self) -> None:
        self._results: deque[list[dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._accepts = True

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Wait until there is room, and add the results."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._results) < _MAX_AHEAD or not self._accepts)
            if self._accepts:
                self._results.append(results)
                self._changed.notify_all()

    def take(self) -> list[dict[str, Any]] | None:
        """Wait for the next results and return them; return None after the last results."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._results) or self._ended)
            self._changed.notify_all()
            return self._results.popleft() if self._results else None

    def end(self) -> None:
        """Record that the run has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Discard the queued results and all later results."""
        with self._changed:
            self._accepts = False
            self._results.clear()
            self._changed.notify_all()


class TrainingIterator(Iterator[list[dict[str, Any]]]):
    """An iterator over the metrics of every rank for each iteration; returned by :meth:`Trainer.run_iterator`.

    The run continues in a background thread, and waits if the loop over the iterator is slow. The run is cancelled when
    the iterator is closed, when a ``with`` block of the iterator ends, or when the iterator is garbage-collected.

    Attributes:
        close: a function that cancels the run if it is still running, and waits up to 60 s for its end.

    Raises:
        TrainingFailedError: the run failed. The loop raises it after the last results.
        KeyboardInterrupt: Ctrl-C while the loop waits; the run has been cancelled.
    """

    def __init__(self, fit: Callable[[Interrupts], Result], feed: Feed) -> None:
        def run(interrupts: Interrupts) -> Result:
            try:
                return fit(interrupts)
            finally:
                feed.end()

        self._feed = feed
        self._handle = RunHandle(run, daemon=True)  # so that the driver can exit after the loop
        weakref.finalize(self, _cancel, self._handle, feed)
        self.close = partial(_close, self._handle, feed)

    def __enter__(self) -> TrainingIterator:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next iteration, and return its metrics by rank."""
        try:
            results = self._feed.take()
        except KeyboardInterrupt:
            self.close()
            raise
        if results is None:
            self._handle.result()
            raise StopIteration
        return results

    def is_finished(self) -> bool:
        """Return True if the run has ended, even if some of its results have not been consumed."""
        return self._handle.done()

    def get_final_results(self, force: bool = False) -> list[Any]:
        """Return the return values of the train function, by rank.

        Args:
            force: wait for the end of the run, and discard results that have not been consumed.

        Raises:
            SessionError: the run has not ended and ``force`` is False.
            TrainingFailedError: the run failed.
        """
        if not force and not self._handle.done():
            raise SessionError(
                "get_final_results(): expected a run that has ended, got one that is still running. Iterate to its "
                "end first, or use get_final_results(force=True)"
            )
        self._feed.discard()
        values: list[Any] = self._handle.result().return_value
        return values


def _close(handle: RunHandle, feed: Feed) -> None:
    _cancel(handle, feed)
    handle.join(_END_WAIT_S)


def _cancel(handle: RunHandle, feed: Feed) -> None:
    feed.discard()
    for _ in range(2):  # the second request terminates the run immediately
        handle.cancel()
