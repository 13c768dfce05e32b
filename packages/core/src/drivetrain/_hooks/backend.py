"""The interface of framework plugins: the backend that a plugin implements, and the worker group that it uses."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drivetrain._base.closest import closest
from drivetrain._hooks.callback import Callback
from drivetrain._hooks.context import AttemptInfo, TrainContext, WorkerInfo
from drivetrain._hooks.finding import Finding
from drivetrain.config import ScalingConfig
from drivetrain.errors import ConfigurationError, FailureKind

__all__ = ["Backend", "BackendConfig", "CallableWorkers", "NoBackend", "WorkerGroup", "WrappedBackend"]

T = TypeVar("T")


class CallableWorkers(Protocol):
    """Workers that can call functions."""

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers, in the order of their ranks."""
        ...

    def run(self, fn: Callable[..., T], /, *args: Any, ranks: Sequence[int] | None = None) -> list[T]:
        """Call a function on the main threads of several workers concurrently, and return the results.

        Args:
            fn: a function that can be pickled.
            *args: the arguments of the function.
            ranks: the ranks of the workers that call the function; None for all workers.

        Returns:
            One result per rank, in the order of ``ranks``.

        Raises:
            Exception: the function raised it on a worker. If it failed on several, this is the exception of the worker
                that comes first in ``ranks``.
            WaitTimeoutError: a worker did not respond within ``RunConfig(start_timeout_s=...)``.
            WorkerDiedError: a worker exited before it responded.
        """
        ...


class WorkerGroup(CallableWorkers, Protocol):
    """The workers of one attempt. A backend uses this interface on the controller."""

    @property
    def attempt(self) -> AttemptInfo:
        """Information about the attempt for which the workers were started."""
        ...


class Backend(ABC):
    """Sets up a framework for distributed training. A framework plugin must implement this class.

    Once the worker processes are running, the controller calls :meth:`rendezvous`, which returns one mapping per rank,
    and sends each mapping to its rank. Each worker enters the context manager that :meth:`session` returns, runs the
    train function, and leaves the context manager. When the attempt ends, with or without an error, the controller
    calls :meth:`close` and then stops the processes. The backend object is pickled and sent to the workers.

    Attributes:
        name: the backend's name in messages.
        preload: names of modules to import before workers are started, once for all workers if the runtime supports
            that. The modules must not start threads or use an accelerator.
        warmup: names of further modules that a training imports soon after its start. A runtime that imports modules
            once for all workers imports these as well, before the workers are started. On another runtime, only
            processes that are started ahead of time import them. They must not start threads or use an accelerator.
        preload_environment: prefixes of the names of environment variables that the modules above may read on import.
            If such a variable changes, the next start imports the modules again. The default matches every variable.
        environment: environment variables that every worker has before it imports anything. They replace variables of
            the same names.
        survives_losses: True if the other ranks can continue when the processes of lost ranks are replaced. The backend
            must then implement :meth:`rejoin`. If False, a loss makes the controller replace all processes.
    """

    name: str = "backend"
    preload: Sequence[str] = ()
    warmup: Sequence[str] = ()
    preload_environment: Sequence[str] = ("",)
    environment: Mapping[str, str] = {}
    survives_losses: bool = False

    def validate(self, scaling: ScalingConfig) -> None:  # noqa: B027 - optional
        """In the driver, before anything is started or written, check that the framework can use these workers.

        Args:
            scaling: the number of workers and their resources.

        Raises:
            ConfigurationError: the framework cannot use them.
        """

    def callbacks(self) -> Sequence[Callback]:
        """Return the callbacks that every run with this backend has, before those in ``RunConfig(callbacks=...)``."""
        return ()

    def rank_environment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
        """On the controller, return further environment variables of one worker.

        The worker sets them before :meth:`rendezvous` is called and before the train function is unpickled. If modules
        are preloaded, however, the worker has already imported them.

        Args:
            worker: the worker.
            workers: all workers, in the order of their ranks.
        """
        return {}

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """On the controller, return the information that each rank needs to find the others, such as a host and port.

        The method must return within ``RunConfig(start_timeout_s=...)``. It is not called on the main thread, so that
        the driver can stop waiting for it.

        Args:
            group: the workers. Their processes are running and wait for commands.

        Returns:
            One mapping per rank.
        """
        return [{} for _ in group.workers]

    @abstractmethod
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
        """On each worker, set up the framework and tear it down after training.

        Args:
            context: information about the worker, its devices and the run.
            rendezvous: this rank's mapping from :meth:`rendezvous`.

        Returns:
            A context manager. The train function runs in its ``with`` block.
        """

    def classify(self, error: BaseException) -> FailureKind | None:
        """On a worker, return the category of an exception that the train function, or its setup, raised.

        Args:
            error: the exception.

        Returns:
            The category of an exception of the framework, such as ``FailureKind.OUT_OF_MEMORY``; None for all other
            exceptions.
        """
        return None

    def rejoin(self, group: WorkerGroup, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        """On the controller, let the other ranks continue with new processes in place of lost ranks.

        Called only if :attr:`survives_losses` is True. This method returns at once. The future is done when every other
        rank has interrupted its work and waits for the new processes. A rank that waits must not report until the new
        processes have joined. If one of the other ranks fails or exits instead, all processes are replaced.

        Args:
            group: the workers. The processes of the lost ranks are new and wait for commands.
            lost: the lost ranks.

        Returns:
            A future whose result is one mapping per lost rank, for :meth:`session`. If the future is cancelled, all
            processes are replaced.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method rejoin() because survives_losses is True")

    def close(self) -> None:  # noqa: B027 - optional
        """On the controller, stop everything that :meth:`rendezvous` started, such as a tracker process."""


class WrappedBackend(Backend):
    """A backend that behaves like another one, except in the methods that a derived class overrides.

    Args:
        inner: the other backend. Its attributes are copied, so a derived class can replace them.

    Attributes:
        inner: the other backend.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.preload, self.warmup = inner.preload, inner.warmup
        self.preload_environment, self.environment = inner.preload_environment, inner.environment
        self.survives_losses = inner.survives_losses

    def validate(self, scaling: ScalingConfig) -> None:
        """See :meth:`Backend.validate`."""
        self.inner.validate(scaling)

    def callbacks(self) -> Sequence[Callback]:
        """See :meth:`Backend.callbacks`."""
        return self.inner.callbacks()

    def rank_environment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
        """See :meth:`Backend.rank_environment`."""
        return self.inner.rank_environment(worker, workers)

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """See :meth:`Backend.rendezvous`."""
        return self.inner.rendezvous(group)

    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
        """See :meth:`Backend.session`."""
        return self.inner.session(context, rendezvous)

    def classify(self, error: BaseException) -> FailureKind | None:
        """See :meth:`Backend.classify`."""
        return self.inner.classify(error)

    def rejoin(self, group: WorkerGroup, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        """See :meth:`Backend.rejoin`."""
        return self.inner.rejoin(group, lost)

    def close(self) -> None:
        """See :meth:`Backend.close`."""
        self.inner.close()


class NoBackend(Backend):
    """Runs the train function without a framework."""

    name = "none"

    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
        """Set up nothing."""
        return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The settings of a backend. A plugin derives its configuration class from it and implements :meth:`create`.

    An object of this class itself stands for training without a framework.
    """

    def create(self) -> Backend:
        """Create the backend.

        Raises:
            ConfigurationError: a derived class does not implement this method.
        """
        if type(self) is BackendConfig:
            return NoBackend()
        methods = [name for name in dir(type(self)) if callable(getattr(type(self), name)) and name != "create"]
        meant = closest("create", methods)
        hint = f" Did you mean {meant!r}?" if meant else ""
        raise ConfigurationError(
            f"[DT-607] {type(self).__qualname__}: expected a method create() that returns the backend, got none.{hint}"
        )

    @classmethod
    def diagnose(cls) -> Iterable[Finding]:
        """Check the framework on this machine, and return the findings for ``drivetrain doctor``."""
        return ()
