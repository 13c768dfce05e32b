"""Names for conformance kits: the checks that a run makes, and the points at which a driver can be crashed."""

from drivetrain._base.closest import closest
from drivetrain._base.crashpoints import ADDRESS, POINTS, socket_address
from drivetrain._base.failure import one_line, text_of
from drivetrain._base.lazy import publish
from drivetrain._driver.callbacks import interface_of, unknown_hooks
from drivetrain._driver.policies import make_policy
from drivetrain._plugins.signatures import find_misspelled_method, find_wrong_method

__all__ = [
    "ADDRESS",
    "POINTS",
    "closest",
    "find_misspelled_method",
    "find_wrong_method",
    "interface_of",
    "make_policy",
    "one_line",
    "socket_address",
    "text_of",
    "unknown_hooks",
]

publish(__name__)
