"""The pytrees of a :class:`~drivetrain_jax.TrainState`: as named arrays, and back.

This module imports JAX, so other modules import it only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drivetrain import ConfigurationError
from drivetrain.plugin.arrays import ArrayEntry, ArrayFiles, StoredArray
from drivetrain_jax._placement import describe_placement, find_sharding

__all__ = ["JaxFiles"]

_NOT_PARAMETERS = ("opt_state", "key")
_KIND, _WEAK, _RANDOM = "kind", "weak", "key"
_CREATED, _PLACED = "created", "placed"
_NUMERIC = "biufcV"  # V: the small floats of ml_dtypes
_JAX, _NUMPY, _NUMBER = "jax", "numpy", "number"


class JaxFiles(ArrayFiles):
    """Writes and reads the pytrees of a training state.

    Args:
        trees: the pytrees by name. :meth:`assign` replaces their leaves.
        objects: see :class:`~drivetrain.plugin.arrays.ArrayFiles`.

    Raises:
        ConfigurationError: a leaf is neither an array nor a number.
    """

    def __init__(self, trees: dict[str, Any], objects: Mapping[str, Any]) -> None:
        super().__init__(objects)
        self._trees = trees
        self._created: dict[str, Any] = {}
        self._created = {name: entry.notes[_PLACED] for name, entry in self.entries(only_parameters=False).items()}

    def entries(self, *, only_parameters: bool) -> dict[str, ArrayEntry]:
        """Return the leaves by name."""
        entries: dict[str, ArrayEntry] = {}
        for tree_name, tree in self._trees.items():
            if only_parameters and tree_name in _NOT_PARAMETERS:
                continue
            for name, leaf in _named_leaves(tree_name, tree):
                if name in entries:
                    raise ConfigurationError(
                        f"[DT-812] TrainState({tree_name}=...): expected leaves with different names, got two with the "
                        f"name {name!r}. Use other keys in the pytree"
                    )
                entries[name] = _entry_of(name, leaf, self._created.get(name))
        return entries

    def agrees(self, entry: ArrayEntry, stored: StoredArray) -> bool:
        """Return True if type and shape are the same. For a number, only its kind must be the same.

        A number becomes an array when a compiled function returns it.
        """
        if _NUMBER not in (entry.notes[_KIND], stored.notes.get(_KIND)):
            return super().agrees(entry, stored) and entry.notes.get(_RANDOM) == stored.notes.get(_RANDOM)
        own, its = jnp.dtype(entry.dtype), jnp.dtype(stored.dtype)
        is_same = own == its or any(
            jnp.issubdtype(own, kind) and jnp.issubdtype(its, kind)
            for kind in (jnp.integer, jnp.floating, jnp.complexfloating)
        )
        return is_same and not entry.shape and not stored.shape

    def assign(self, arrays: Mapping[str, StoredArray]) -> None:
        """Replace the leaves that the arrays belong to."""
        for tree_name, tree in self._trees.items():
            leaves = [
                _restore(arrays[name], leaf, self._created.get(name)) if name in arrays else leaf
                for name, leaf in _named_leaves(tree_name, tree)
            ]
            self._trees[tree_name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _named_leaves(tree_name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield "/".join(filter(None, [tree_name, jax.tree_util.keystr(path, simple=True, separator="/")])), leaf


def _is_random_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _entry_of(name: str, leaf: Any, created: Any) -> ArrayEntry:
    notes: dict[str, Any] = {_KIND: _JAX, _CREATED: created}
    if _is_random_key(leaf):
        notes[_RANDOM] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    elif isinstance(leaf, jax.Array):
        notes[_WEAK] = bool(jax.typeof(leaf).weak_type)
    else:
        notes[_KIND] = _NUMBER if type(leaf) in (bool, int, float, complex) else _NUMPY
        is_array = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in _NUMERIC
        if not is_array and notes[_KIND] is _NUMPY:
            raise ConfigurationError(
                f"[DT-812] TrainState: expected a pytree of arrays and numbers, got {leaf!r:.100} of type "
                f"{type(leaf).__qualname__} in {name}. Leave out other leaves: eqx.filter(model, eqx.is_array) in "
                "Equinox, nnx.state(model) in Flax NNX"
            )
        leaf = np.asarray(leaf)
    notes[_PLACED] = describe_placement(leaf)
    is_chunked = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    parts = _chunks(leaf) if is_chunked else _whole(leaf)
    return ArrayEntry(dtype=leaf.dtype.name, shape=leaf.shape, notes=notes, is_chunked=is_chunked, parts=parts)


def _whole(leaf: Any) -> Iterator[tuple[None, Any]]:
    yield None, np.asarray(leaf)


def _chunks(leaf: jax.Array) -> Iterator[tuple[tuple[tuple[int, int], ...], Any]]:
    """Yield the parts of an array on the devices of this process. Of equal parts, the first is chosen."""
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            bounds = [each.indices(size)[:2] for each, size in zip(shard.index, leaf.shape, strict=True)]
            yield tuple((start, stop) for start, stop in bounds), np.asarray(shard.data)


def _restore(stored: StoredArray, leaf: Any, created: Any) -> Any:
    """Return a leaf of the kind that was saved.

    Args:
        stored: what was saved.
        leaf: the leaf of the state that is replaced.
        created: the description of the place of this leaf.
    """
    kind = stored.notes.get(_KIND)
    if kind != _JAX and not isinstance(leaf, jax.Array):
        return stored.read().item() if kind == _NUMBER else stored.read()
    if _is_random_key(leaf):
        data = _place(stored, jax.random.key_data(leaf), created)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return _place(stored, leaf, created)


def _place(stored: StoredArray, leaf: Any, created: Any) -> jax.Array:
    sharding = find_sharding(leaf, created, stored.notes.get(_PLACED), stored.notes.get(_CREATED))
    array: jax.Array
    if sharding is None:  # not bound to devices, so that it can be combined with arrays on any devices
        array = jnp.asarray(stored.read())
    else:
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.dtype(stored.dtype)
        array = jax.make_array_from_callback(
            stored.shape, sharding, lambda index: stored.read(index).astype(dtype, copy=False)
        )
    if stored.notes.get(_WEAK) is True:  # numbers that JAX has converted have a weak type, which decides later types
        copy = jax.jit(lambda weak, new: weak.at[...].set(new), out_shardings=sharding)
        array = copy(jnp.asarray(leaf), array)
    return array
