"""What the controller asks of a runtime."""

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
    """Where the output of workers goes.

    Attributes:
        console: where the output of shown ranks appears.
        shown_ranks: the ranks whose output is shown on the console.
        log_directory: the directory of the ``rank_N.log`` files; None writes none.
    """

    console: Console
    shown_ranks: frozenset[int]
    log_directory: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """The worker group that an attempt wants.

    Attributes:
        num_workers: how many workers.
        scaling: the resources of each, and where to place them.
        preload: see :class:`~drivetrain.Backend`.
        warmup: see :class:`~drivetrain.Backend`.
        preload_environment: see :class:`~drivetrain.Backend`.
        output: where the output of the workers goes.
        start_timeout_s: seconds until every worker must be running the train function.
        interrupts: what ends the run from outside; looked after wherever the group waits.
        run_resources: what a runtime keeps from one group of a run for the next is given back when this is closed.
        elastic: the next group of the run may be of another size.
        avoided: ids of nodes to place no worker on, as long as there are others.
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
    """A worker group as the controller drives it."""

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """Sends ranks their tasks; they start on them at once."""
        ...

    def replace(self, ranks: Sequence[int]) -> None:
        """Starts new processes for ranks that are lost, and waits until they can be called.

        Raises:
            WorkerDiedError: they did not start, or not where the lost ones were.
            WaitTimeoutError: not within ``start_timeout_s``.
        """
        ...

    def woken_by(self, future: Future[Any]) -> AbstractContextManager[None]:
        """Has :meth:`pump` return when a future is done, for the time of a ``with`` block."""
        ...

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """Waits until something happens, and delivers every event that is there, each rank's in order.

        Args:
            deliver: called with each event, on the calling thread. If it returns true, no further event is delivered,
                and the call returns.
            timeout_s: seconds after which to return even if nothing happened; None for no limit.
        """
        ...

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """Sends a command to ranks whose train functions are running, without waiting; they answer with events."""
        ...

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """The Python stacks of the ranks that could be asked, all threads each; of others, why they did not answer.

        It takes a second or so, and may be called from any thread.
        """
        ...

    def rest(self) -> bool:
        """The run is over: lets go of what is the run's, and says whether the group may serve another one."""
        ...

    def renew(self, spec: GroupSpec) -> bool:
        """Makes a group that rests one of another run.

        Returns:
            False if a new group would be something else: a process is gone or does not answer, the driver's
            environment or a module's file has changed, another size is asked for. The group is then to be ended.
        """
        ...


class Runtime(ABC):
    """Starts worker groups.

    A runtime that is configured with the address of a cluster reads it from the environment variable
    ``<NAME>_ADDRESS``, where ``<NAME>`` is its name in upper case.

    Attributes:
        name: what selects it.
        in_driver: the train function runs in the driver's own process.
    """

    name: str = ""
    in_driver: bool = False

    @classmethod
    def detect(cls) -> bool:
        """Whether the environment selects this runtime where no other is named; called without loading a library."""
        return False

    @classmethod
    def diagnose(cls, address: str | None) -> Iterable[Finding]:
        """The checks of ``drivetrain doctor`` for this runtime.

        Args:
            address: the address of a cluster, from the command line or the environment; None without one.
        """
        return ()

    def reduce(self, value: Any) -> Any:
        """How to pickle an object that only this runtime can send to workers: as ``__reduce__`` says it.

        Returns:
            ``NotImplemented`` for all other objects.
        """
        return NotImplemented

    @abstractmethod
    def validate(self, scaling: ScalingConfig) -> None:
        """Refuses, before anything is started, what this runtime can never provide.

        Raises:
            ResourceError: more is asked for than exists.
            ConfigurationError: something is asked for that this runtime does not know.
        """
        ...

    @abstractmethod
    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """How many workers an elastic run could have now; an estimate, which takes no longer than a few seconds.

        Args:
            scaling: the resources of each worker, and the bounds of their number.
            running: those that run already.
            avoided: ids of nodes that are to have none, as long as there are others.
        """
        ...

    @abstractmethod
    def launch(self, spec: GroupSpec) -> AbstractContextManager[Group]:
        """Starts a group; leaving the context ends every process of it and releases every resource."""
        ...


def rank_environment(worker: WorkerInfo, *, world_size: int, local_world_size: int) -> dict[str, str]:
    """The variables that tell a worker its ranks, under the names that torchrun and most launchers use."""
    return {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(worker.node_rank),
        "NODE_RANK": str(worker.node_rank),
    }
