"""Names for code in a worker: the session of a train function, and the requests to end a run."""

from drivetrain._base.failure import behind_exit
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.lazy import publish
from drivetrain._worker.metrics import plain_metrics
from drivetrain._worker.observer import OBSERVER, Observer
from drivetrain._worker.script import Script, ScriptBackend, package_of
from drivetrain._worker.session import Session, active_session
from drivetrain._worker.uploads import UploadRequest

__all__ = [
    "OBSERVER",
    "Interrupts",
    "Observer",
    "Script",
    "ScriptBackend",
    "Session",
    "UploadRequest",
    "active_session",
    "behind_exit",
    "package_of",
    "plain_metrics",
]

publish(__name__)
