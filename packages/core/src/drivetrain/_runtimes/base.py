"""The interface between the controller and a runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain._base.ports import PORTS, parse_ports
from drivetrain._hooks.backend import CallableWorkers
from drivetrain._wire.events import Event

if TYPE_CHECKING:
    from drivetrain._base.console import Console
    from drivetrain._base.interrupts import Interrupts
    from drivetrain._hooks.context import WorkerInfo
    from drivetrain._hooks.finding import Finding
    from drivetrain._wire.commands import RunningTaskCommand
    from drivetrain._wire.task import TrainTask
    from drivetrain.config import ScalingConfig

__all__ = ["Group", "GroupOutput", "GroupSpec", "RoomTakenError", "Runtime", "rank_environment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutput:
    """The destinations of the workers' output.

    Attributes:
        console: the console that shows the output of the ranks in ``shown_ranks``.
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
        scaling: the resources of each worker, and the placement of the workers on nodes.
        preload: see :class:`~drivetrain.plugin.Backend`.
        warmup: see :class:`~drivetrain.plugin.Backend`.
        preload_environment: see :class:`~drivetrain.plugin.Backend`.
        environment: environment variables that every worker must have before it imports the modules in ``preload``.
        output: the destinations of the workers' output.
        start_timeout_s: seconds within which every worker must start running the train function.
        interrupts: requests to end the run, which come from signals or from other threads. The group handles them
            whenever it waits.
        run_resources: a stack that is closed at the end of the run. If a runtime keeps resources from one group of the
            run for the next, it must register the functions that release these resources on this stack.
        elastic: True if the next group of the run may have another size.
        avoided: ids of nodes on which to place no workers if there are other nodes.
    """

    num_workers: int
    scaling: ScalingConfig
    preload: Sequence[str]
    warmup: Sequence[str]
    preload_environment: Sequence[str]
    environment: Mapping[str, str]
    output: GroupOutput
    start_timeout_s: float
    interrupts: Interrupts
    run_resources: ExitStack
    elastic: bool = False
    avoided: frozenset[str] = frozenset()

    @property
    def ports(self) -> range | None:
        """The TCP ports to listen on for connections of workers; None for any port."""
        text = self.environment.get(PORTS)
        return None if text is None else parse_ports(text, PORTS)


class RoomTakenError(Exception):
    """Another run has taken resources that :meth:`Runtime.room` had found for an elastic run."""


class Group(CallableWorkers, Protocol):
    """The worker group of a runtime, as the controller uses it."""

    def set_environment(self, variables: Mapping[int, Mapping[str, str]]) -> None:
        """Set environment variables of workers, and wait until they are set.

        Args:
            variables: for some ranks, the values by name.
        """
        ...

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """Send each task to the rank in its context. The ranks start their tasks at once."""
        ...

    def replace(self, ranks: Sequence[int]) -> None:
        """Start new processes for lost ranks, and wait until :meth:`run` can call functions on these ranks again.

        Raises:
            WorkerDiedError: a new process did not start, or started on another node than the lost process.
            WaitTimeoutError: a new process did not start within ``start_timeout_s``.
        """
        ...

    def woken_by(self, future: Future[Any]) -> AbstractContextManager[None]:
        """During a ``with`` block, make :meth:`pump` return when a future is done."""
        ...

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """Wait until something happens, and deliver all available events, in the order in which each rank sent them.

        Args:
            deliver: called with each event, on the calling thread. If it returns True, this method returns without
                delivering further events.
            timeout_s: seconds after which to return if nothing happens; None for no limit.
        """
        ...

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """Send a command to ranks whose train functions are running, without waiting. Responses arrive as events."""
        ...

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the Python stacks of all threads of each rank, or the reason why the rank did not respond.

        The call usually takes about a second. It must end within 20 s, because ``drivetrain stacks`` waits 30 s. Any
        thread may call this method. Ranks whose process has exited may be missing from the result.
        """
        ...

    def park(self) -> bool:
        """Park the group at the end of a run: release the run's resources. Return True if the group can be reused."""
        ...

    def reuse(self, spec: GroupSpec) -> bool:
        """Reuse a parked group for another run.

        Returns:
            False if this group is not equivalent to a new one: a process has exited or does not respond, the driver's
            environment or the file of a module has changed, or another size is requested. The caller must then end the
            group.
        """
        ...


class Runtime(ABC):
    """Starts worker groups.

    A runtime that needs the address of a cluster reads the address from the environment variable ``<NAME>_ADDRESS``,
    where ``<NAME>`` is the runtime's name in upper case.

    Attributes:
        name: the name by which users select the runtime.
        in_driver: True if the train function runs in the driver's own process.
    """

    name: str = ""
    in_driver: bool = False

    @classmethod
    def detect(cls) -> bool:
        """Return True if the environment selects this runtime.

        Called if the user selects no runtime. This method must not import libraries.
        """
        return False

    @classmethod
    def diagnose(cls, address: str | None) -> Iterable[Finding]:
        """Check this runtime, and return the findings for ``drivetrain doctor``.

        Args:
            address: the address of a cluster, from the command line or the environment; None without one.
        """
        return ()

    def reduce(self, value: Any) -> Any:
        """Reduce an object for pickling, if only this runtime can send such an object to workers.

        Returns:
            The same kind of value as ``__reduce__``, or ``NotImplemented`` for all other objects.
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

    def ignored_settings(self, scaling: ScalingConfig) -> Sequence[str]:
        """Return a sentence for each setting that this runtime ignores; each is printed once in a process."""
        return ()

    @abstractmethod
    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Estimate how many workers an elastic run could have now, including the running ones.

        The call takes at most a few seconds.

        Args:
            scaling: the resources of each worker, and the minimum and maximum number of workers.
            running: the workers that are running.
            avoided: ids of nodes on which to place no workers if there are other nodes.
        """
        ...

    @abstractmethod
    def launch(self, spec: GroupSpec) -> AbstractContextManager[Group]:
        """Start a group. Leaving the context stops all its processes and releases all its resources."""
        ...


def rank_environment(worker: WorkerInfo, *, world_size: int, local_world_size: int, nodes: int = 1) -> dict[str, str]:
    """Return environment variables with a worker's ranks, under the names that torchrun and other launchers use."""
    return {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(worker.node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "NODE_RANK": str(worker.node_rank),
    }
