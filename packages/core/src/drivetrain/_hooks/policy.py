"""The interface of failure policies, which decide whether and when to start another attempt after a failure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure

__all__ = ["FailurePolicy", "FunctionPolicy"]


class FailurePolicy(Protocol):
    """Decides whether and when to retry after a failure. Pass it as ``FailureConfig(policy=...)``."""

    @abstractmethod
    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Return whether to start another attempt, and when.

        Args:
            failure: the root cause of the attempt that just failed.
            history: the root causes of the earlier failed attempts, oldest first.

        Returns:
            False to end the run; True to retry at once; or a number of seconds, at least 0, after which to retry. The
            number 0 means the same as True.
        """
        ...


class FunctionPolicy:
    """A policy that calls a function.

    Args:
        function: called with the arguments of :meth:`FailurePolicy.decide`.
    """

    def __init__(self, function: Callable[[Failure, Sequence[Failure]], bool | float]) -> None:
        self._function = function

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """See :meth:`FailurePolicy.decide`."""
        return self._function(failure, history)
