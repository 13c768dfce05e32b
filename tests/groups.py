"""Worker groups without processes, for tests of what a group does when many of its workers exit."""

from contextlib import ExitStack, closing

from drivetrain import ScalingConfig
from drivetrain._base.console import Console
from drivetrain._base.interrupts import Interrupts
from drivetrain._runtimes.base import GroupOutput, GroupSpec


def group_spec(count: int, resources: ExitStack) -> GroupSpec:
    """Return the specification of a group with a number of workers whose output is not shown."""
    return GroupSpec(
        num_workers=count,
        scaling=ScalingConfig(num_workers=count),
        preload=(),
        warmup=(),
        preload_environment=(),
        environment={},
        output=GroupOutput(console=Console(), shown_ranks=frozenset()),
        start_timeout_s=180,
        interrupts=resources.enter_context(closing(Interrupts())),
        run_resources=resources,
    )
