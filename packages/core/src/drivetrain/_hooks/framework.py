"""The interface of plugins that seed the random generators of a framework, and recognize its objects of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain._hooks.context import TrainContext

__all__ = ["Framework"]


class Framework:
    """Describes a framework. A plugin derives a class from it, and implements the methods that the framework needs.

    Attributes:
        warmup: names of modules that a training imports soon after its start. They are imported once for all local
            workers. They must not start threads or initialize an accelerator.
    """

    warmup: Sequence[str] = ()

    def reseed(self) -> None:
        """Seed the global random generators from the operating system, as in a new process.

        Called in a worker that was forked after the framework was imported, and in one that has already run another
        train function. The method must not start threads or initialize an accelerator.
        """

    def limit_threads(self, threads: int) -> None:
        """Limit the number of threads that the framework starts for an operation, in all threads of the process.

        Called in a worker that was forked from the driver, where the framework has been imported for all cores.

        Args:
            threads: the largest number.
        """

    def random_state(self) -> Mapping[str, Any]:
        """Return the state of the global random generators, which a checkpoint contains for each rank.

        The method is called while the framework is imported. It must not draw a random number or initialize an
        accelerator. The values must be numbers, strings, None, lists and dictionaries of them, or tensors that the
        framework stores without pickling objects of other classes. Return an empty mapping if nothing can be restored.
        """
        return {}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the global random generators.

        Args:
            state: a return value of :meth:`random_state`. It was read from a checkpoint, so check it: raise a
                ``ValueError`` or ``TypeError`` if it is something else. If the training state of another framework was
                saved, tensors have become arrays of NumPy, and tuples have become lists.
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
