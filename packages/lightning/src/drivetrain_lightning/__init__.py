"""Lightning for drivetrain: strategies, an environment and a callback for a ``Trainer`` in a train function.

Lightning has two distributions: ``lightning``, imported as ``lightning.pytorch``, and ``pytorch_lightning``. The
classes of this package derive from classes of the distribution that is already imported. If both or neither of the
distributions are imported, the classes derive from classes of ``lightning`` if it is installed, and otherwise from
classes of ``pytorch_lightning``. A program that uses both distributions imports the classes from
:mod:`drivetrain_lightning.lightning` or :mod:`drivetrain_lightning.pytorch_lightning` instead. Importing this package
imports neither distribution.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from drivetrain import PluginError
from drivetrain_lightning._prepare import prepare_trainer

if TYPE_CHECKING:
    from drivetrain_lightning.lightning import (
        RayDDPStrategy,
        RayDeepSpeedStrategy,
        RayFSDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
    )

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]

__version__ = "0.1.0"

_MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""For each distribution, the module that users import. The keys are also the names of this package's modules."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_used_distribution()}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _used_distribution() -> str:
    imported = [name for name, module in _MODULES.items() if sys.modules.get(module) is not None]
    installed = imported or [name for name in _MODULES if importlib.util.find_spec(name) is not None]
    if not installed:
        raise PluginError(
            "drivetrain_lightning requires lightning or pytorch_lightning, which are not installed. Run on every node: "
            "pip install lightning"
        )
    return installed[0]
