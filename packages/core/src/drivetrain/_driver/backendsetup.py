"""Calls the methods of a backend in the driver. An error names the backend, the method and what was expected.

``Backend.rendezvous()`` is called on a thread of its own, so that the driver can stop waiting for it.
"""

from __future__ import annotations

import contextvars
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from drivetrain._base.failure import one_line, rank_of
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.wakeup import MAX_POLL_S, Wakeup
from drivetrain._driver.services import RunServices
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.callback import Callback
from drivetrain._hooks.context import AttemptInfo, WorkerInfo
from drivetrain._runtimes.base import Group
from drivetrain._runtimes.stacks import own_stacks
from drivetrain.config import ScalingConfig
from drivetrain.errors import BackendError, DrivetrainError, WaitTimeoutError

__all__ = ["BackendSetup", "default_callbacks", "environment_of", "validate"]

T = TypeVar("T")

_MARGIN_S = 5.0
"""Seconds by which ``WorkerGroup.run()`` times out earlier, because its error names the ranks that do not respond."""

_END_S = 1.0
"""Seconds to wait, after an interrupt, for the thread that calls a backend to stop using the group."""


class BackendGroup:
    """The group as a backend sees it; see :class:`drivetrain.plugin.backends.WorkerGroup`.

    Args:
        group: the group.
        attempt: information about the attempt.
    """

    def __init__(self, group: Group, attempt: AttemptInfo) -> None:
        self._group = group
        self.attempt = attempt

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """See :attr:`drivetrain.plugin.backends.WorkerGroup.workers`."""
        return self._group.workers

    def run(self, fn: Callable[..., T], /, *args: Any, ranks: Sequence[int] | None = None) -> list[T]:
        """See :meth:`drivetrain.plugin.backends.WorkerGroup.run`."""
        return self._group.run(fn, *args, ranks=ranks)


class BackendSetup:
    """Lets the backend of a run prepare the workers of an attempt.

    Args:
        services: the services of the run.
        group: the group of workers.
        number: the number of the attempt.
        in_driver: True if the only worker is the driver's own process.
    """

    def __init__(self, services: RunServices, group: Group, number: int, *, in_driver: bool) -> None:
        run = services.run
        self._backend = services.backend
        self._interrupts = services.interrupts
        self._in_driver = in_driver
        self._timeout_s = timeout_s = run.run_config.start_timeout_s
        self._group = group
        self._view = BackendGroup(
            group, AttemptInfo(number=number, run_name=run.name, run_id=run.id, start_timeout_s=timeout_s)
        )

    def set_environment(self, ranks: Sequence[int]) -> None:
        """Set the environment variables that the backend defines for each of some ranks."""
        workers = self._group.workers
        variables = {rank: self._rank_environment(workers[rank], workers) for rank in ranks}
        if any(variables.values()):
            self._group.set_environment(variables)

    def rendezvous(self) -> Sequence[Mapping[str, str]]:
        """Let the backend prepare the ranks, and return its mapping for each rank.

        Raises:
            BackendError: the backend raised an exception, or did not return one mapping of strings per rank.
            WaitTimeoutError: the backend did not return within ``RunConfig(start_timeout_s=...)``.
        """
        backend, size = self._backend, len(self._group.workers)
        found = _call(backend, "rendezvous", self._limited_rendezvous)
        if not isinstance(found, Sequence) or not all(isinstance(entry, Mapping) for entry in found):
            raise _error(backend, "rendezvous", f"expected a list with one mapping per rank, got {found!r:.200}")
        if len(found) != size:
            raise _error(backend, "rendezvous", f"expected {size} mappings, one per rank, got {len(found)}")
        for rank, mapping in enumerate(found):
            _check_strings(backend, "rendezvous", mapping, rank)
        return found

    def rejoin(self, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        """See :meth:`drivetrain.plugin.Backend.rejoin`."""
        return self._backend.rejoin(self._view, lost)

    def _rank_environment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> dict[str, str]:
        found = _call(self._backend, "rank_environment", lambda: self._backend.rank_environment(worker, workers))
        return _variables(self._backend, "rank_environment", found)

    def _limited_rendezvous(self) -> object:
        if self._in_driver:  # functions that the backend calls on the worker must be on the driver's thread too
            return self._backend.rendezvous(self._view)
        calling = _Calling(lambda: self._backend.rendezvous(self._view), self._interrupts)
        if calling.wait(self._timeout_s + _MARGIN_S):
            return calling.result()
        raise WaitTimeoutError(
            f"[DT-303] backend {self._backend.name!r} failed in rendezvous: expected it to return within "
            f"RunConfig(start_timeout_s={self._timeout_s:g}), got no result. The stacks of the driver's "
            f"threads, one of which calls the method:\n{own_stacks()}"
        )


class _Calling:
    """A function that is being called on another thread.

    Args:
        function: the function. It may use the group: this thread does not use the group at the same time.
        interrupts: the requests to end the run.
    """

    def __init__(self, function: Callable[[], object], interrupts: Interrupts) -> None:
        self._function = function
        self._interrupts = interrupts
        self._value: object = None
        self._error: BaseException | None = None
        self._ended = Wakeup()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._call,), daemon=True, name="drivetrain rendezvous"
        )
        self._thread.start()

    def _call(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # raised again on the driver's thread
            self._error = error
        self._ended.wake()

    def wait(self, seconds: float) -> bool:
        """Wait until the function has returned or raised. Return False after the timeout.

        Raises:
            BaseException: the end of the run was requested.
        """
        deadline = time.monotonic() + seconds
        poller = select.poll()
        for source in (self._ended, self._interrupts):
            poller.register(source, select.POLLIN)
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                ready = {descriptor for descriptor, _ in poller.poll(1000 * min(remaining, MAX_POLL_S))}
                if self._ended.fileno() in ready:
                    return True
                if ready:
                    self._interrupts.act()
            return False
        except BaseException:
            self._thread.join(_END_S)  # the caller ends the group
            raise
        finally:
            self._ended.close()

    def result(self) -> object:
        """Return the value of the function, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._value


def validate(backend: Backend, scaling: ScalingConfig) -> None:
    """Let the backend check the number of workers and their resources.

    Raises:
        ConfigurationError: the framework cannot use these workers.
        BackendError: the backend raised another exception.
    """
    _call(backend, "validate", lambda: backend.validate(scaling))


def default_callbacks(backend: Backend) -> list[Callback]:
    """Return the callbacks of a backend.

    Raises:
        BackendError: the backend raised an exception, or did not return callbacks.
    """
    found = _call(backend, "callbacks", backend.callbacks)
    if not isinstance(found, Sequence) or not all(isinstance(each, Callback) for each in found):
        raise _error(backend, "callbacks", f"expected a list of drivetrain.Callback objects, got {found!r:.200}")
    return list(found)


def environment_of(backend: Backend) -> dict[str, str]:
    """Return the environment variables of a backend for all workers.

    Raises:
        BackendError: it is not a mapping of strings.
    """
    return _variables(backend, "environment", backend.environment)


def _call(backend: Backend, method: str, function: Callable[[], object]) -> object:
    """Call a function of a backend. An exception other than ours becomes an error that names the backend."""
    try:
        return function()
    except DrivetrainError:
        raise
    except Exception as error:  # raised by a plugin
        rank = rank_of(error)
        raise _error(backend, method, one_line(error), rank) from error


def _variables(backend: Backend, source: str, found: object) -> dict[str, str]:
    return dict(_check_strings(backend, source, found))


def _check_strings(backend: Backend, source: str, found: object, rank: int | None = None) -> Mapping[str, str]:
    if not isinstance(found, Mapping) or not all(isinstance(part, str) for pair in found.items() for part in pair):
        raise _error(backend, source, f"expected a mapping from names to strings, got {found!r:.200}", rank)
    return found


def _error(backend: Backend, method: str, problem: str, rank: int | None = None) -> BackendError:
    where = "" if rank is None else f" (rank {rank})"
    return BackendError(f"[DT-607] backend {backend.name!r} failed in {method}{where}: {problem}")
