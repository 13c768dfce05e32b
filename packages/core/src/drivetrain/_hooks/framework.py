"""The interface of plugins that seed the random generators of a framework, and recognize its objects of one process."""

from __future__ import annotations

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
