"""The interface of plugins that seed the random generators of a framework, and recognize its objects of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain._hooks.context import TrainContext

__all__ = ["Framework"]


class Framework:
    """Describes a framework. A plugin derives a class from it, and implements the methods that the framework needs."""

    def reseed(self) -> None:
        """Seed the global random generators from the operating system, as in a new process.

        Called in a worker that was forked after the framework was imported, and in one that has already run another
        train function. The method must not start threads or initialize an accelerator.
        """

    def belongs_to_process(self, value: object) -> bool:
        """Return True if an object is bound to the processes among which it was created, such as a process group.

        In a worker, a copy of such an object would behave as if the worker trained alone. Therefore ``fit()`` refuses
        a train function or a config that contains one.

        Args:
            value: an object of a class that is defined in the framework, or of a subclass.
        """
        return False

    def launcher_variables(self, context: TrainContext, max_failures: int) -> Mapping[str, str]:
        """On each worker, return environment variables that the framework's own launcher would set for a script.

        Used for ``drivetrain run script.py --num-workers N``, also if the framework is not imported yet. The variables
        ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``NODE_RANK``, ``GROUP_RANK``,
        ``GROUP_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are always set.

        Args:
            context: information about the worker and the run.
            max_failures: the number of retries; see :class:`~drivetrain.FailureConfig`.
        """
        return {}
