"""Names for runtimes that start worker processes themselves."""

from drivetrain._base.failure import describe_exit
from drivetrain._base.lazy import publish
from drivetrain._plugins.frameworks import reseed
from drivetrain._runtimes.parent import ProcessParent
from drivetrain._runtimes.processes import close_in_forked_children, kill_group
from drivetrain._runtimes.resources import OomCounter, explain_exit
from drivetrain._wire.commands import Refuse
from drivetrain._wire.frames import Channel, Inbox, send_message
from drivetrain._worker.leaving import EXIT_LIMIT_S
from drivetrain._worker.output import flush_output

__all__ = [
    "EXIT_LIMIT_S",
    "Channel",
    "Inbox",
    "OomCounter",
    "ProcessParent",
    "Refuse",
    "close_in_forked_children",
    "describe_exit",
    "explain_exit",
    "flush_output",
    "kill_group",
    "reseed",
    "send_message",
]

publish(__name__)
