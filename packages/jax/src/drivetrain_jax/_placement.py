"""Where the arrays of a training state are: described in JSON, and found again after a restart.

The compiler may give the result of a step another sharding than its argument had, and the order of additions can depend
on the sharding. An array is therefore restored to where it was when it was saved, provided that the train function has
created it as before. Otherwise, the array is placed where the train function has created it.

This module imports JAX, so other modules import it only inside functions.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["describe_placement", "find_sharding"]


def describe_placement(leaf: object) -> Any:
    """Return where an array is, as values that JSON can represent; None if it is not bound to devices."""
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return None
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(mesh := sharding.mesh, Mesh):
        return str(sharding)
    return {
        "axes": [[str(name), size] for name, size in mesh.shape.items()],
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec],
        "memory": sharding.memory_kind,
        "is_plain": mesh == _plain_mesh(mesh.shape),
    }


def find_sharding(leaf: object, created: Any, placed: Any, was_created: Any) -> jax.sharding.Sharding | None:
    """Return the sharding with which an array is restored; None for an array that is not bound to devices.

    Args:
        leaf: the array of the state that is replaced.
        created: the description of its place.
        placed: the description of the place of the array that was saved.
        was_created: the description of the place that this array had at first.

    Raises:
        ValueError, TypeError: a description is damaged.
    """
    own = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    if created != was_created or not isinstance(placed, dict):
        return own
    axes = dict(placed["axes"])
    mesh = own.mesh if isinstance(own, NamedSharding) else None
    if not isinstance(mesh, Mesh) or dict(mesh.shape) != axes:
        mesh = _plain_mesh(axes) if placed["is_plain"] is True else None
    if mesh is None:
        return own
    spec = PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in placed["spec"]))
    return NamedSharding(mesh, spec, memory_kind=placed["memory"])


def _plain_mesh(axes: Any) -> Mesh | None:
    """Return the mesh of all devices in the usual order with some axes; None for another number of devices."""
    sizes = tuple(axes.values())
    if math.prod(sizes) != jax.device_count():
        return None
    return Mesh(np.array(jax.devices()).reshape(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))
