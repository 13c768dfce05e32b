"""The dimensions of a device mesh by name, and which ranks of a mesh read the same rows.

The names are those of PyTorch's documentation and of torchtitan. A mesh has at most one dimension of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from drivetrain.errors import ConfigurationError

__all__ = ["DataPosition", "coordinates_of", "data_position", "mesh_kinds"]

_NAMES = {
    "data": ("dp", "data"),
    "replicate": ("dp_replicate", "replicate"),
    "shard": ("dp_shard", "shard", "fsdp"),
    "context": ("cp", "context"),
    "tensor": ("tp", "tensor"),
    "pipeline": ("pp", "pipeline"),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
_DATA_PARALLEL = ("data", "replicate", "shard")


class DataPosition(NamedTuple):
    """The part of the data that a rank reads. Ranks with the same position read the same rows.

    Attributes:
        part: the number of the part, from 0.
        parts: the number of parts.
    """

    part: int
    parts: int


def mesh_kinds(names: Sequence[str] | None, problem: str) -> dict[str, str]:
    """Return the names of the dimensions of a mesh by their kind, in the order of the mesh.

    Args:
        names: the names of the dimensions; None if they have no names.
        problem: the beginning of the error: the code, and the argument that contains the mesh.

    Returns:
        A mapping from kinds to names. The kinds are ``"data"``, ``"replicate"``, ``"shard"``, ``"context"``,
        ``"tensor"`` and ``"pipeline"``.

    Raises:
        ConfigurationError: a dimension has no name or an unknown one, or two dimensions are of the same kind.
    """
    known = "; ".join(f"{kind}: {' or '.join(map(repr, values))}" for kind, values in _NAMES.items())
    if names is None:
        raise ConfigurationError(
            f"{problem}: expected a mesh with names, got one without. Name its dimensions: {known}"
        )
    kinds: dict[str, str] = {}
    for name in names:
        kind = _KINDS.get(name)
        if kind is None or kind in kinds:
            got = repr(name) if kind is None else f"the {kind} dimensions {kinds[kind]!r} and {name!r}"
            raise ConfigurationError(
                f"{problem}: expected at most one dimension of each kind, with a known name, got {got}. Rename the "
                f"dimensions: {known}"
            )
        kinds[kind] = name
    return kinds


def coordinates_of(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the coordinates of a rank in a mesh whose ranks are in order: the last coordinate changes first."""
    coordinates: list[int] = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        coordinates.insert(0, coordinate)
    return coordinates


def data_position(kinds: Mapping[str, str], sizes: Sequence[int], coordinates: Sequence[int]) -> DataPosition:
    """Return which part of the data a rank of a mesh reads.

    Args:
        kinds: the return value of :func:`mesh_kinds`.
        sizes: the sizes of all dimensions.
        coordinates: the coordinates of the rank.
    """
    part, parts = 0, 1
    for kind, size, coordinate in zip(kinds, sizes, coordinates, strict=True):
        if kind in _DATA_PARALLEL:
            part, parts = part * size + coordinate, parts * size
    return DataPosition(part, parts)
