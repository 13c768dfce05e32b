"""Pickling of Ray's object references."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reduce_reference"]


def reduce_reference(value: Any) -> Any:
    """Pickle an object reference with the location of the object, like Ray's own pickler."""
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(value, getattr(ray, "ObjectRef", ())):
        return ray.cloudpickle.loads, (ray.cloudpickle.dumps(value),)
    return NotImplemented
