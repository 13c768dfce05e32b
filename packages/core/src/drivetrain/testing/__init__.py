"""Conformance tests for plugins, and a harness that crashes jobs and checks their recovery.

The conformance kits require pytest. Run: ``pip install "drivetrain[testing]"``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.testing.conformance import BackendConformance
    from drivetrain.testing.crash import Crash, CrashFound, CrashHarness, CrashReport
    from drivetrain.testing.datasets import DatasetConformance

__all__ = ["BackendConformance", "Crash", "CrashFound", "CrashHarness", "CrashReport", "DatasetConformance"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BackendConformance":  # imports pytest
        from drivetrain.testing import conformance as module
    elif name == "DatasetConformance":  # imports pytest
        from drivetrain.testing import datasets as module  # type: ignore[no-redef]
    else:
        from drivetrain.testing import crash as module  # type: ignore[no-redef]
    return getattr(module, name)
