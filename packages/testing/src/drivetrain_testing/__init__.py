"""Conformance tests for plugins, and a harness that crashes jobs and checks their recovery.

The kits import pytest, so each one is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_testing._callbacks import CallbackConformance
    from drivetrain_testing._commands import CommandConformance
    from drivetrain_testing._conformance import BackendConformance, check_overrides
    from drivetrain_testing._crash import Crash, CrashFound, CrashHarness, CrashReport
    from drivetrain_testing._datasets import DatasetConformance
    from drivetrain_testing._frameworks import FrameworkConformance
    from drivetrain_testing._policies import PolicyConformance
    from drivetrain_testing._preparing import PrepareConformance
    from drivetrain_testing._prove.causes import Cause
    from drivetrain_testing._prove.comparing import Difference
    from drivetrain_testing._prove.job import CannotProveError
    from drivetrain_testing._prove.proof import Proof, prove
    from drivetrain_testing._runtimes import RuntimeCapability, RuntimeConformance
    from drivetrain_testing._storages import StorageConformance
    from drivetrain_testing._trainables import TrainableConformance
    from drivetrain_testing._trainers import TrainerConformance
    from drivetrain_testing._views import ViewConformance

__all__ = [
    "BackendConformance",
    "CallbackConformance",
    "CannotProveError",
    "Cause",
    "CommandConformance",
    "Crash",
    "CrashFound",
    "CrashHarness",
    "CrashReport",
    "DatasetConformance",
    "Difference",
    "FrameworkConformance",
    "PolicyConformance",
    "PrepareConformance",
    "Proof",
    "RuntimeCapability",
    "RuntimeConformance",
    "StorageConformance",
    "TrainableConformance",
    "TrainerConformance",
    "ViewConformance",
    "check_overrides",
    "prove",
]

__version__ = "0.1.0"

_MODULES = {
    "CallbackConformance": "_callbacks",
    "CommandConformance": "_commands",
    "BackendConformance": "_conformance",
    "check_overrides": "_conformance",
    "Crash": "_crash",
    "CrashFound": "_crash",
    "CrashHarness": "_crash",
    "CrashReport": "_crash",
    "DatasetConformance": "_datasets",
    "FrameworkConformance": "_frameworks",
    "PolicyConformance": "_policies",
    "PrepareConformance": "_preparing",
    "CannotProveError": "_prove.job",
    "Cause": "_prove.causes",
    "Difference": "_prove.comparing",
    "Proof": "_prove.proof",
    "prove": "_prove.proof",
    "RuntimeCapability": "_runtimes",
    "RuntimeConformance": "_runtimes",
    "StorageConformance": "_storages",
    "TrainableConformance": "_trainables",
    "TrainerConformance": "_trainers",
    "ViewConformance": "_views",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
