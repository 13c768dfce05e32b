"""``RunHandle``: a run that executes in a background thread of the driver, to wait for or to cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable

from drivetrain._base.interrupts import Interrupts
from drivetrain._driver.result import Result
from drivetrain.errors import RunCancelledError, WaitTimeoutError

__all__ = ["RunHandle"]


class RunHandle:
    """A run that was started in the background, by :meth:`drivetrain.DataParallelTrainer.start`.

    Args:
        fit: runs the training. Its argument contains the requests to end the run.
        daemon: True if the driver process can exit without waiting for the run.
    """

    def __init__(self, fit: Callable[[Interrupts], Result], *, daemon: bool = False) -> None:
        self._interrupts = Interrupts()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._when_done: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(fit,), name="drivetrain run", daemon=daemon)
        self._thread.start()

    def done(self) -> bool:
        """Return True if the run is over."""
        return not self._thread.is_alive()

    def when_done(self, function: Callable[[], None]) -> None:
        """Call a function when the run ends, on the run's thread; immediately, on this thread, if the run has ended."""
        with self._lock:
            if self._result is None and self._error is None:
                self._when_done.append(function)
                return
        function()

    def cancel(self) -> None:
        """Request the end of the run, like Ctrl-C, and return without waiting for it.

        The first call lets a train function that polls for preemptions save and return, and terminates any other train
        function immediately. The second call terminates the train function in any case.
        """
        self._interrupts.request("the run was cancelled", RunCancelledError("the run was cancelled"))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the run ends, successfully or not, or until the timeout expires."""
        self._thread.join(timeout_s)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end of the run and return its result.

        Ctrl-C during the wait cancels the run and waits for its end.

        Args:
            timeout_s: the maximum wait in seconds; None for no limit.

        Raises:
            WaitTimeoutError: the timeout expired; the run continues.
            RunCancelledError: the run was cancelled.
            Exception: any exception that ``fit()`` raises.
        """
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self.cancel()
            self._thread.join()
            raise
        if self._thread.is_alive():
            raise WaitTimeoutError(f"the run has not ended after {timeout_s:g} s; it continues")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self, fit: Callable[[Interrupts], Result]) -> None:
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = fit(self._interrupts)
        except BaseException as raised:  # result() raises this error
            error = raised
        finally:
            self._interrupts.close()
        with self._lock:
            self._result, self._error = result, error
            functions, self._when_done = self._when_done, []
        for function in functions:
            function()
