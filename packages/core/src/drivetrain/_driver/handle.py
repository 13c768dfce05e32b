"""A run that goes on in a thread of the driver: waited for, or cancelled."""

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
        fit: runs it, ended by what it is given.
        daemon: the end of the driver does not wait for it.
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
        """Whether the run is over."""
        return not self._thread.is_alive()

    def when_done(self, function: Callable[[], None]) -> None:
        """Has a function be called when the run is over, on the run's thread; at once if it is over already."""
        with self._lock:
            if self._result is None and self._error is None:
                self._when_done.append(function)
                return
        function()

    def cancel(self) -> None:
        """Ends the run, without waiting for it, as Ctrl-C does.

        The first call has a train function that asks for preemptions save and return, and ends any other at once; the
        second call ends it at once in any case.
        """
        self._interrupts.request("the run was cancelled", RunCancelledError("the run was cancelled"))

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the run, however it ends, or until so many seconds are over."""
        self._thread.join(timeout_s)

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the end of the run.

        Ctrl-C while it waits cancels the run, and waits for that.

        Args:
            timeout_s: seconds to wait at most; None for no limit.

        Raises:
            WaitTimeoutError: the time is over; the run goes on.
            RunCancelledError: it was cancelled.
            Exception: whatever ``fit()`` raises.
        """
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self.cancel()
            self._thread.join()
            raise
        if self._thread.is_alive():
            raise WaitTimeoutError(f"waited {timeout_s:g} s for the end of the run, which goes on")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self, fit: Callable[[Interrupts], Result]) -> None:
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = fit(self._interrupts)
        except BaseException as raised:  # result() raises it
            error = raised
        finally:
            self._interrupts.close()
        with self._lock:
            self._result, self._error = result, error
            called, self._when_done = self._when_done, []
        for function in called:
            function()
