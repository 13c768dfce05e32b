"""Conformance tests for plugins, and a harness that crashes jobs and checks their recovery.

The conformance kits require pytest. Run: ``pip install "drivetrain[testing]"``.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain.testing.callbacks import CallbackConformance
    from drivetrain.testing.commands import CommandConformance
    from drivetrain.testing.conformance import BackendConformance, check_overrides
    from drivetrain.testing.crash import Crash, CrashFound, CrashHarness, CrashReport
    from drivetrain.testing.datasets import DatasetConformance
    from drivetrain.testing.frameworks import FrameworkConformance
    from drivetrain.testing.policies import PolicyConformance
    from drivetrain.testing.preparing import PrepareConformance
    from drivetrain.testing.runtimes import RuntimeCapability, RuntimeConformance
    from drivetrain.testing.storages import StorageConformance
    from drivetrain.testing.trackers import TrackerConformance
    from drivetrain.testing.trainables import TrainableConformance
    from drivetrain.testing.trainers import TrainerConformance
else:
    # The kits import pytest, so each one is imported when it is first used.
    _SOURCES = {
        "drivetrain.testing.callbacks": "CallbackConformance",
        "drivetrain.testing.commands": "CommandConformance",
        "drivetrain.testing.conformance": "BackendConformance check_overrides",
        "drivetrain.testing.crash": "Crash CrashFound CrashHarness CrashReport",
        "drivetrain.testing.datasets": "DatasetConformance",
        "drivetrain.testing.frameworks": "FrameworkConformance",
        "drivetrain.testing.policies": "PolicyConformance",
        "drivetrain.testing.preparing": "PrepareConformance",
        "drivetrain.testing.runtimes": "RuntimeCapability RuntimeConformance",
        "drivetrain.testing.storages": "StorageConformance",
        "drivetrain.testing.trackers": "TrackerConformance",
        "drivetrain.testing.trainables": "TrainableConformance",
        "drivetrain.testing.trainers": "TrainerConformance",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = [
    "BackendConformance",
    "CallbackConformance",
    "CommandConformance",
    "Crash",
    "CrashFound",
    "CrashHarness",
    "CrashReport",
    "DatasetConformance",
    "FrameworkConformance",
    "PolicyConformance",
    "PrepareConformance",
    "RuntimeCapability",
    "RuntimeConformance",
    "StorageConformance",
    "TrackerConformance",
    "TrainableConformance",
    "TrainerConformance",
    "check_overrides",
]
