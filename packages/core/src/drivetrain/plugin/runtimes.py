"""Names for runtimes: groups of workers and the connections to them."""

from drivetrain._base.lazy import publish
from drivetrain._base.wakeup import Wakeup
from drivetrain._runtimes.base import Group, GroupOutput, GroupSpec
from drivetrain._runtimes.local import LocalRuntime
from drivetrain._runtimes.remote import RemoteGroup
from drivetrain._runtimes.servers import ForkServers
from drivetrain._runtimes.stacks import NO_RESPONSE, read_stacks
from drivetrain._wire.handshake import DriverAddress, Introduction, WorkerListener, connect_to_driver
from drivetrain._worker.main import worker_main

__all__ = [
    "NO_RESPONSE",
    "DriverAddress",
    "ForkServers",
    "Group",
    "GroupOutput",
    "GroupSpec",
    "Introduction",
    "LocalRuntime",
    "RemoteGroup",
    "Wakeup",
    "WorkerListener",
    "connect_to_driver",
    "read_stacks",
    "worker_main",
]

publish(__name__)
