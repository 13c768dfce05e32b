"""All that a framework plugin sees: the backend it writes, and the worker group it may touch."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drivetrain._hooks.context import TrainContext, WorkerInfo
from drivetrain._hooks.finding import Finding

__all__ = ["Backend", "BackendConfig", "NoBackend", "WorkerGroup"]

T = TypeVar("T")


class WorkerGroup(Protocol):
    """The workers of one attempt, as a backend may use them on the controller."""

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers, by rank."""
        ...

    def run(self, fn: Callable[..., T], /, *args: Any, ranks: Sequence[int] | None = None) -> list[T]:
        """Calls a function on the main thread of workers, at the same time, and returns the results by rank.

        Args:
            fn: a function that can be pickled.
            *args: its arguments.
            ranks: the workers to call it on; None for all.

        Raises:
            Exception: what the function raised on the first rank that failed.
            WaitTimeoutError: a worker did not answer within the time that the run allows for its start.
            WorkerDiedError: a worker ended meanwhile.
        """
        ...


class Backend(ABC):
    """Sets a framework up for distributed training: the one class a framework plugin has to write.

    The controller calls :meth:`rendezvous` once the worker processes are up, and hands each rank its mapping. Each
    worker enters :meth:`session`, runs the train function in it, and leaves it. The controller calls :meth:`close`
    when the attempt is over, however it went, and then ends the processes. The object is pickled to the workers.

    Attributes:
        name: what messages call the backend.
        preload: modules to import before workers are started, once for all of them where the runtime can; they
            must start no threads and touch no accelerator.
        warmup: further modules that make a start faster and that a first start need not wait for; same rules.
        preload_environment: how the names of the environment variables begin that those modules may read while they
            are imported. When one of them has changed, the next start imports anew. All of them unless it is set.
        survives_losses: when ranks are lost, the others can stay and go on with new processes in the places of the
            lost: the backend has :meth:`rejoin`. Otherwise all are replaced.
    """

    name: str = "backend"
    preload: Sequence[str] = ()
    warmup: Sequence[str] = ()
    preload_environment: Sequence[str] = ("",)
    survives_losses: bool = False

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """On the controller: what each rank has to know to find the others, such as an address and a port.

        Args:
            group: the workers, up and waiting.

        Returns:
            One mapping per rank.
        """
        return [{} for _ in group.workers]

    @abstractmethod
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
        """On each worker: set the framework up, run the train function in the ``with`` block, and take it down.

        Args:
            context: where this worker is.
            rendezvous: this rank's mapping.
        """

    def rejoin(self, group: WorkerGroup, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        """On the controller, where :attr:`survives_losses`: there are new processes for lost ranks.

        It returns at once, and the future is done when every other rank has left what it was doing, will not report
        before the new processes have joined, and waits for them. Should one of them fail or end instead, all are
        replaced.

        Args:
            group: the workers, of which those of the lost ranks are new and wait.
            lost: the ranks.

        Returns:
            The future, of one mapping for each of the lost ranks; cancelled where all are to be replaced.
        """
        raise NotImplementedError(f"{type(self).__name__} declares survives_losses: expected a method rejoin")

    def close(self) -> None:  # noqa: B027 - optional
        """On the controller: stop what :meth:`rendezvous` started, such as a tracker."""


class NoBackend(Backend):
    """No framework: the train function runs as it is."""

    name = "none"

    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> AbstractContextManager[None]:
        """Sets nothing up."""
        return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The settings of a backend. A plugin's own configuration derives from it and overrides :meth:`create`."""

    def create(self) -> Backend:
        """The backend that these settings describe."""
        return NoBackend()

    @classmethod
    def diagnose(cls) -> Iterable[Finding]:
        """The checks of ``drivetrain doctor`` for the framework on this machine."""
        return ()
