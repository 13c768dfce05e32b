"""Pickles Ray's object references."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reduce_reference"]


def reduce_reference(value: Any) -> Any:
    """Reduce an object reference as Ray's own pickler does: the result includes the owner of the object.

    Returns:
        A value that ``__reduce__`` may return; ``NotImplemented`` if the argument is not an object reference.
    """
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(value, getattr(ray, "ObjectRef", ())):
        return ray.cloudpickle.loads, (ray.cloudpickle.dumps(value),)
    return NotImplemented
