"""For authors of plugins and jobs: checks that any backend has to pass, and a harness that crashes jobs.

The conformance kit needs pytest (``pip install "drivetrain[testing]"``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.testing.conformance import BackendConformance
    from drivetrain.testing.crash import Crash, CrashFound, CrashHarness, CrashReport

__all__ = ["BackendConformance", "Crash", "CrashFound", "CrashHarness", "CrashReport"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BackendConformance":  # which wants pytest
        from drivetrain.testing import conformance as module
    else:
        from drivetrain.testing import crash as module  # type: ignore[no-redef]
    return getattr(module, name)
