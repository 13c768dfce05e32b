"""Short digests of values: of the rows of a batch, and of the objects that a train function holds."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["digest", "is_random_generator", "row_digests"]

_BYTES = 8
_MAX_DEPTH = 6
_MAX_ITEMS = 100_000
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def row_digests(batch: Any) -> list[str]:
    """Return a digest of each row of a batch, which depends only on the content of the row.

    A batch that cannot be split into rows counts as one row.
    """
    columns = list(_columns(batch))
    sizes = {len(column) for column in columns}
    if len(sizes) != 1:
        return [_short(repr([_encoded(column) for column in columns]).encode())]
    return [_short(b"|".join(_encoded(column[row]) for column in columns)) for row in range(sizes.pop())]


def _columns(batch: Any) -> Iterator[Sequence[Any]]:
    """Yield the arrays and lists that contain the rows of a batch, in a fixed order."""
    batch = _as_mapping(batch)
    if isinstance(batch, Mapping):
        for _, value in sorted(batch.items(), key=lambda item: str(item[0])):
            yield from _columns(value)
    elif (array := _as_array(batch)) is not None:
        yield array if array.ndim else array.reshape(1)
    elif isinstance(batch, (list, tuple)) and any(_as_array(part) is not None for part in batch):
        for part in batch:
            yield from _columns(part)
    elif isinstance(batch, (list, tuple)):
        yield batch
    else:
        yield [batch]


def _as_mapping(batch: Any) -> Any:
    """Return a table or a data frame as a mapping of columns; anything else unchanged."""
    kind = type(batch).__module__.partition(".")[0]
    if kind == "pyarrow" and hasattr(batch, "column_names"):
        return {name: batch[name].to_pylist() for name in batch.column_names}
    if kind in ("pandas", "polars") and hasattr(batch, "columns"):
        return {str(name): batch[name].to_numpy() for name in batch.columns}
    return batch


def _as_array(value: Any) -> Any:
    """Return a tensor or an array as an array of NumPy; None for other values."""
    kind = type(value).__module__.partition(".")[0]
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return _array_of_tensor(value)
    if kind in ("numpy", "jax", "jaxlib", "tensorflow") and hasattr(value, "__array__") and hasattr(value, "shape"):
        import numpy as np

        return np.asarray(value)
    return None


def _array_of_tensor(tensor: Any) -> Any:
    import torch

    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # the part of a sharded tensor on this rank
    tensor = tensor.detach().cpu()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    try:
        return tensor.numpy()
    except TypeError:  # NumPy has no bfloat16
        return tensor.contiguous().view(torch.uint8).numpy() if tensor.ndim else tensor.float().numpy()


def _encoded(value: Any) -> bytes:
    if hasattr(value, "tobytes"):
        return value.tobytes()  # type: ignore[no-any-return]
    return repr(value).encode()


def _short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_BYTES).hexdigest()


def is_random_generator(value: Any) -> bool:
    """Return True for an object that draws random numbers, such as ``numpy.random.default_rng(0)``."""
    return _random_state(value) is not None


def _random_state(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for other values."""
    if isinstance(value, random.Random):
        return value.getstate()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return value.bit_generator.state
    if kind.startswith("numpy.random") and hasattr(value, "get_state"):
        return value.get_state()
    if kind.startswith("torch") and hasattr(value, "initial_seed") and hasattr(value, "get_state"):
        return value.get_state()
    return None


def digest(value: Any) -> str | None:
    """Return a digest of a value of a train function; None if it has no content that can be compared."""
    hashing = hashlib.blake2b(digest_size=_BYTES)
    return hashing.hexdigest() if _update(hashing, value, _MAX_DEPTH) else None


def _update(hashing: Any, value: Any, depth: int) -> bool:
    """Add a value to a digest. Return False if it is of a kind that cannot be compared."""
    if isinstance(value, _SCALARS):
        hashing.update(f"{type(value).__name__}:{value!r};".encode())
        return True
    if depth == 0:
        return False
    if (array := _as_array(value)) is not None:
        if array.dtype.hasobject:
            return _update(hashing, array.tolist(), depth - 1)
        hashing.update(f"{array.dtype}{array.shape}:".encode() + array.tobytes())
        return True
    if (state := _random_state(value)) is not None:
        return _update(hashing, state, depth - 1)
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda item: str(item[0]))
        return len(pairs) <= _MAX_ITEMS and all(_update_pair(hashing, pair, depth) for pair in pairs)
    if isinstance(value, (list, tuple)):
        hashing.update(f"{len(value)}[".encode())
        return len(value) <= _MAX_ITEMS and all(_update(hashing, part, depth - 1) for part in value)
    if isinstance(value, (set, frozenset)):
        return _update(hashing, sorted(map(str, value)), depth - 1)
    return _update_object(hashing, value, depth)


def _update_pair(hashing: Any, pair: tuple[Any, Any], depth: int) -> bool:
    hashing.update(f"{pair[0]}=".encode())
    return _update(hashing, pair[1], depth - 1)


def _update_object(hashing: Any, value: Any, depth: int) -> bool:
    """Add the state of an object. Loaders, modules, functions and objects of drivetrain have none that counts."""
    module = type(value).__module__
    root = module.partition(".")[0]
    if root.startswith("drivetrain") or isinstance(value, (type, type(sys))) or callable(value):
        return False
    if module.startswith("torch.utils.data"):
        return False
    if callable(getattr(value, "state_dict", None)):
        return _update(hashing, value.state_dict(), depth - 1)
    if root in sys.stdlib_module_names or not hasattr(value, "__dict__"):
        return False
    return _update(hashing, vars(value), depth - 1)
