"""Lightning for drivetrain: strategies, an environment and a callback for a ``Trainer`` in a train function.

The names are made for whichever of the two distributions is used: ``lightning``, imported as ``lightning.pytorch``, or
``pytorch_lightning``. That is the one that is imported already; of both or none of them, ``lightning`` if it is
installed. A program that uses both imports from :mod:`drivetrain_lightning.pytorch_lightning` or
:mod:`drivetrain_lightning.lightning` instead. Importing this package imports neither.
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

_MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""What is imported of each distribution; the names are those of our own modules as well."""


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
            "drivetrain_lightning: expected the package lightning or pytorch_lightning, found none of them: "
            "run pip install lightning, on every node"
        )
    return installed[0]
