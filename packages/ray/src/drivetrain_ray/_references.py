"""How Ray's references to objects are pickled."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reduce_reference"]


def reduce_reference(value: Any) -> Any:
    """Pickles a reference to an object along with where to find the object, as only Ray's own pickler does."""
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(value, getattr(ray, "ObjectRef", ())):
        return ray.cloudpickle.loads, (ray.cloudpickle.dumps(value),)
    return NotImplemented
