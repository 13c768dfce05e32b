"""Describes JAX for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

from drivetrain.plugin import Framework
from drivetrain.plugin.backends import is_instance_of

__all__ = ["JaxFramework"]


class JaxFramework(Framework):
    """Knows the objects that contain devices. JAX has no global random generators."""

    def belongs_to_process(self, value: object) -> bool:
        """Return True for a device, and for a mesh or a sharding, which contain devices."""
        return (
            is_instance_of(value, "jax", "Device")
            or is_instance_of(value, "jax.sharding", "Mesh")
            or is_instance_of(value, "jax.sharding", "Sharding")
        )
