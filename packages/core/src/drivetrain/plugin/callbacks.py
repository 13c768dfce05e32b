"""Names for callbacks and trackers: the events of a run, its metrics, and texts without secrets."""

from drivetrain._base.console import Console
from drivetrain._base.lazy import publish
from drivetrain._base.metrics import find_metric, flatten, has_metric, reported_metrics, writable
from drivetrain._base.outcome import RunOutcome, outcome_of
from drivetrain._base.printable import printable, printable_text
from drivetrain._base.redact import as_text, masked, redact
from drivetrain._hooks.context import Trial
from drivetrain._storage.committed import CommittedCheckpoint

__all__ = [
    "CommittedCheckpoint",
    "Console",
    "RunOutcome",
    "Trial",
    "as_text",
    "find_metric",
    "flatten",
    "has_metric",
    "masked",
    "outcome_of",
    "printable",
    "printable_text",
    "redact",
    "reported_metrics",
    "writable",
]

publish(__name__)
