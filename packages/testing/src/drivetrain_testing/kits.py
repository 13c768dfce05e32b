"""Names for the authors of conformance kits: a package that defines a hook of its own has a kit of its own."""

from drivetrain_testing._callbacks import check_hooks, check_pickling
from drivetrain_testing._checks import check_equal
from drivetrain_testing._cleanup import assert_nothing_left
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import STEPS, make_trainer, run_two_workers

__all__ = [
    "STEPS",
    "assert_nothing_left",
    "check_equal",
    "check_hooks",
    "check_overrides",
    "check_pickling",
    "make_trainer",
    "run_two_workers",
]
