"""How what workers run and are given is pickled."""

from __future__ import annotations

import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["dumps"]


def dumps(value: Any) -> bytes:
    """Pickles functions and classes of scripts too, by value, so that ``pickle.loads`` can load them elsewhere."""
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Knows what cloudpickle alone gets wrong.

    That is modules of a class of their own, as ``torch.backends.cudnn`` is, which go by name; and Ray's references to
    objects, which only Ray pickles along with where to find the object: a worker would wait for it for ever.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        ray = sys.modules.get("ray")
        if ray is not None and isinstance(obj, getattr(ray, "ObjectRef", ())):
            return ray.cloudpickle.loads, (ray.cloudpickle.dumps(obj),)
        return super().reducer_override(obj)
