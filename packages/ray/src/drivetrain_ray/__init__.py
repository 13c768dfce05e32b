"""Ray for drivetrain: the runtime for Ray clusters, Ray Data datasets, and trainers in Ray Tune.

Importing this package does not import Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_ray._datasets import RayDatasets
    from drivetrain_ray._runtime import RayRuntime
    from drivetrain_ray._tune import make_trainable

__all__ = ["RayDatasets", "RayRuntime", "make_trainable"]

__version__ = "0.1.0"

_MODULES = {"RayDatasets": "_datasets", "RayRuntime": "_runtime", "make_trainable": "_tune"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
