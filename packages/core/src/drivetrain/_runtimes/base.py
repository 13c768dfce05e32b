"""The interface between the controller and a runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain._hooks.backend import WorkerGroup
from drivetrain._wire.events import Event

if TYPE_CHECKING:
    from drivetrain._base.console import Console
    from drivetrain._base.interrupts import Interrupts
    from drivetrain._hooks.context import WorkerInfo
    from drivetrain._hooks.finding import Finding
    from drivetrain._wire.commands import RunningTaskCommand
    from drivetrain._wire.task import TrainTask
    from drivetrain.config import ScalingConfig

__all__ = ["Group", "GroupOutput", "GroupSpec", "Runtime", "rank_environment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutput:
    """The destinations of the workers' output.

    Attributes:
        console: shows the output of the shown ranks.
        shown_ranks: the ranks whose output is shown on the console.
        log_directory: the directory of the ``rank_N.log`` files; None to write no files.
    """

    console: Console
    shown_ranks: frozenset[int]
    log_directory: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """The worker group to start for an attempt.

    Attributes:
        num_workers: the number of workers.
        scaling: the resources of each worker, and where to place the workers.
        preload: see :class:`~drivetrain.Backend`.
        warmup: see :class:`~drivetrain.Backend`.
        preload_environment: see :class:`~drivetrain.Backend`.
        output: the destinations of the workers' output.
        start_timeout_s: seconds within which every worker must start running the train function.
        interrupts: requests from outside to end the run. The group handles them whenever it waits.
        run_resources: closed at the end of the run. A runtime registers here the release of everything that it keeps
            from one group of the run for the next.
        elastic: True if the next group of the run may have another size.
        avoided: ids of nodes on which to place no workers, as long as there are other nodes.
    """

    num_workers: int
    scaling: ScalingConfig
    preload: Sequence[str]
    warmup: Sequence[str]
    preload_environment: Sequence[str]
    output: GroupOutput
    start_timeout_s: float
    interrupts: Interrupts
    run_resources: ExitStack
    elastic: bool = False
    avoided: frozenset[str] = frozenset()


class Group(WorkerGroup, Protocol):
    """The worker group of a runtime, as the controller uses it."""

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """Send ranks their tasks. The ranks start at once."""
        ...

    def replace(self, ranks: Sequence[int]) -> None:
        """Start new processes for lost ranks, and wait until :meth:`run` works on them.

        Raises:
            WorkerDiedError: a process did not start, or not on the node of the lost one.
            WaitTimeoutError: a process did not start within ``start_timeout_s``.
        """
        ...

    def woken_by(self, future: Future[Any]) -> AbstractContextManager[None]:
        """During a ``with`` block, make :meth:`pump` return when a future is done."""
        ...

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """Wait until something happens, and deliver all available events, in order for each rank.

        Args:
            deliver: called with each event, on the calling thread. If it returns True, this method returns without
                delivering further events.
            timeout_s: seconds after which to return if nothing happens; None for no limit.
        """
        ...

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """Send a command to ranks whose train functions are running, without waiting. They respond with events."""
        ...

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the Python stacks of ranks with all their threads, or the reason why a rank did not respond.

        It takes about a second. Any thread may call it. Ranks whose process has exited may be missing.
        """
        ...

    def park(self) -> bool:
        """Park the group at the end of a run: release the run's resources, and return True if it can be reused."""
        ...

    def reuse(self, spec: GroupSpec) -> bool:
        """Reuse a parked group for another run.

        Returns:
            False if a new group would differ: a process exited or does not respond, the driver's environment or the
            file of a module has changed, or another size is requested. The caller must then end the group.
        """
        ...


class Runtime(ABC):
    """Starts worker groups.

    A runtime that is configured with the address of a cluster reads it from the environment variable
    ``<NAME>_ADDRESS``, where ``<NAME>`` is its name in upper case.

    Attributes:
        name: the name that selects it.
        in_driver: True if the train function runs in the driver's own process.
    """

    name: str = ""
    in_driver: bool = False

    @classmethod
    def detect(cls) -> bool:
        """Return True if the environment selects this runtime.

        Called if the user selects no runtime. It must not import libraries.
        """
        return False

    @classmethod
    def diagnose(cls, address: str | None) -> Iterable[Finding]:
        """Check this runtime, for ``drivetrain doctor``.

        Args:
            address: the address of a cluster, from the command line or the environment; None without one.
        """
        return ()

    def reduce(self, value: Any) -> Any:
        """Return how to pickle an object that only this runtime can send to workers, like ``__reduce__``.

        Returns:
            ``NotImplemented`` for all other objects.
        """
        return NotImplemented

    @abstractmethod
    def validate(self, scaling: ScalingConfig) -> None:
        """Check, before anything is started, that this runtime can provide the workers and resources.

        Raises:
            ResourceError: the configuration requires more resources than exist.
            ConfigurationError: the configuration requires something that this runtime does not support.
        """
        ...

    @abstractmethod
    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Estimate how many workers an elastic run could have now. Takes at most a few seconds.

        Args:
            scaling: the resources of each worker, and the minimum and maximum number of workers.
            running: the workers that are running.
            avoided: ids of nodes to place no workers on, as long as there are other nodes.
        """
        ...

    @abstractmethod
    def launch(self, spec: GroupSpec) -> AbstractContextManager[Group]:
        """Start a group. Leaving the context stops all its processes and releases all its resources."""
        ...


def rank_environment(worker: WorkerInfo, *, world_size: int, local_world_size: int) -> dict[str, str]:
    """Return environment variables with a worker's ranks, named as by torchrun and most other launchers."""
    return {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(worker.node_rank),
        "NODE_RANK": str(worker.node_rank),
    }
