"""The results of a run as they come, for a loop of one's own."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from drivetrain._base.interrupts import Interrupts
from drivetrain._driver.handle import RunHandle
from drivetrain._driver.result import Result
from drivetrain.errors import SessionError
from drivetrain.interactive.callbacks import TrainingCallback

__all__ = ["Feed", "TrainingIterator"]

_AHEAD = 16
_END_WAIT_S = 60.0


class Feed(TrainingCallback):
    """Hands results from the run's thread to the iterator's, which it waits for when it is too far ahead."""

    def __init__(self) -> None:
        self._results: deque[list[dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._is_wanted = True

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Waits until there is room, and adds the results."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._results) < _AHEAD or not self._is_wanted)
            if self._is_wanted:
                self._results.append(results)
                self._changed.notify_all()

    def take(self) -> list[dict[str, Any]] | None:
        """The next results, or None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._results) or self._is_over)
            self._changed.notify_all()
            return self._results.popleft() if self._results else None

    def end(self) -> None:
        """The run is over."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody wants what is still to come."""
        with self._changed:
            self._is_wanted = False
            self._results.clear()
            self._changed.notify_all()


class TrainingIterator(Iterator[list[dict[str, Any]]]):
    """What :meth:`Trainer.run_iterator` returns: for each iteration, the metrics of every rank.

    The run goes on in a thread of the driver, and waits for a loop that takes its time. It is cancelled when the
    iterator is closed, at the end of a ``with`` block at the latest, or when nobody holds it any more.

    Attributes:
        close: a function that cancels the run if it goes on, and waits for its end.

    Raises:
        TrainingFailedError: from the loop: the run failed.
        KeyboardInterrupt: Ctrl-C in the loop's wait; the run has ended.
    """

    def __init__(self, fit: Callable[[Interrupts], Result], feed: Feed) -> None:
        def run(interrupts: Interrupts) -> Result:
            try:
                return fit(interrupts)
            finally:
                feed.end()

        self._feed = feed
        self._handle = RunHandle(run, daemon=True)  # an end of the driver must not wait for a loop that has ended
        weakref.finalize(self, _give_up, self._handle, feed)
        self.close = partial(_close, self._handle, feed)

    def __enter__(self) -> TrainingIterator:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __next__(self) -> list[dict[str, Any]]:
        """Waits for the next iteration that all ranks have reported."""
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
        """Whether the run is over, whether or not all of its results were taken."""
        return self._handle.done()

    def get_final_results(self, force: bool = False) -> list[Any]:
        """What the train function has returned, by rank.

        Args:
            force: wait for the end of the run, and drop results that were not taken.

        Raises:
            SessionError: the run goes on, and ``force`` was not asked for.
            TrainingFailedError: the run failed.
        """
        if not force and not self._handle.done():
            raise SessionError(
                "get_final_results(): expected a run that is over, got one that goes on: iterate to its end first, or "
                "use get_final_results(force=True)"
            )
        self._feed.give_up()
        values: list[Any] = self._handle.result().return_value
        return values


def _close(handle: RunHandle, feed: Feed) -> None:
    _give_up(handle, feed)
    handle.join(_END_WAIT_S)


def _give_up(handle: RunHandle, feed: Feed) -> None:
    feed.give_up()
    for _ in range(2):  # the second request is one to end at once
        handle.cancel()
