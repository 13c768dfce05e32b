"""A failure policy that waits while machines are replaced."""

from collections.abc import Sequence

from drivetrain import FailureKind
from drivetrain.plugin import Failure


class PatientPolicy:
    """Retry lost processes, and wait longer after each failure.

    Args:
        first_s: the delay in seconds after the first failure. Each further failure
            doubles it.
        max_s: the longest delay in seconds.
        limit: the number of failures after which the run ends.
    """

    def __init__(
        self, first_s: float = 0.1, max_s: float = 600.0, limit: int = 20
    ) -> None:
        self.first_s = first_s
        self.max_s = max_s
        self.limit = limit

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Return False to end the run, or the seconds after which to retry."""
        if failure.kind is FailureKind.USER_ERROR or len(history) >= self.limit:
            return False
        return min(self.max_s, self.first_s * 2.0 ** len(history))
