"""Describes Lightning for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

import sys

from drivetrain.plugin import Framework
from drivetrain.plugin.backends import is_instance_of

__all__ = ["LightningFramework"]


class LightningFramework(Framework):
    """Knows the objects that contain a strategy, which was set up for one process when they were created."""

    def belongs_to_process(self, value: object) -> bool:
        """Return True for a ``Trainer``, a ``Fabric``, and the objects that a ``Fabric`` has set up."""
        if any(is_instance_of(value, module, "Trainer") for module in ("lightning.pytorch", "pytorch_lightning")):
            return True
        for name in ("lightning.fabric", "lightning_fabric"):
            package = sys.modules.get(name)
            if package is not None and (isinstance(value, package.Fabric) or package.is_wrapped(value)):
                return True
        return False
