"""The outcomes of a run, defined once for the progress line, the timeline and the readers of run directories."""

from __future__ import annotations

import enum

from drivetrain.errors import RunCancelledError

__all__ = ["RunOutcome", "outcome_of"]


class RunOutcome(enum.Enum):
    """How a run ended. The values appear in ``timeline.jsonl`` and in messages."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


def outcome_of(error: BaseException | None) -> RunOutcome:
    """Return how a run ended.

    Args:
        error: the exception that ended the run; None if it succeeded.

    Returns:
        ``FINISHED`` without an error; ``INTERRUPTED`` after Ctrl-C, SIGTERM or
        :meth:`drivetrain.RunHandle.cancel`; ``FAILED`` after any other error.
    """
    if error is None:
        return RunOutcome.FINISHED
    if isinstance(error, (KeyboardInterrupt, SystemExit, RunCancelledError)):
        return RunOutcome.INTERRUPTED
    return RunOutcome.FAILED
