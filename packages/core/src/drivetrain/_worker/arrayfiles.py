"""Files of named arrays that NumPy reads: ``numpy.load(..., allow_pickle=False)``.

An array of which each rank has a part is stored in chunks: the entry ``weight[0:4,0:8]`` has the elements of ``weight``
with these indices.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain._storage.reading import open_regular

if TYPE_CHECKING:
    import numpy as np

__all__ = ["StoredArray", "read_arrays", "write_arrays"]

Bounds = tuple[tuple[int, int], ...]
"""For each dimension, the first index, and the index after the last one."""

_SUFFIX = ".npy"
_CHUNK = re.compile(r"(.*)\[(\d+:\d+(?:,\d+:\d+)*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in one or several files. Its elements are read when they are needed.

    Attributes:
        name: its name.
        dtype: the name of its type.
        shape: its shape.
        notes: what else the plugin of the framework has stored about it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    notes: Mapping[str, Any]
    _chunks: list[tuple[Bounds, zipfile.ZipFile, str]] = field(default_factory=list)

    def read(self, index: Sequence[slice] | None = None) -> np.ndarray[Any, Any]:
        """Read the elements with some indices, or all.

        Args:
            index: a slice without a step for each dimension.

        Raises:
            ValueError: a part is missing or damaged.
        """
        import numpy as np

        slices = [slice(None)] * len(self.shape) if index is None else index
        wanted = tuple(each.indices(size)[:2] for each, size in zip(slices, self.shape, strict=True))
        dtype = np.dtype(self.dtype)
        result = np.empty([stop - start for start, stop in wanted], dtype)
        parts: list[list[tuple[int, int]]] = []
        for bounds, archive, entry in self._chunks:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, bounds, strict=True)]
            if all(start < stop for start, stop in common):
                chunk = self._read_chunk(archive, entry, bounds, dtype)
                own = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, wanted, strict=True))
                its = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, bounds, strict=True))
                result[own] = chunk[its]
                parts.append(common)
        # Without the second condition, a part that is there twice could hide a gap, with whatever memory contained.
        if sum(map(_size, parts)) != result.size or any(itertools.starmap(_overlap, itertools.combinations(parts, 2))):
            raise ValueError(f"{self.name} is incomplete, or has parts twice")
        return result

    def _read_chunk(self, archive: zipfile.ZipFile, entry: str, bounds: Bounds, dtype: Any) -> Any:
        import numpy as np

        with archive.open(entry) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        is_plain = dtype.kind != "V"
        stored = dtype if is_plain else _integer_of(dtype)
        if array.shape != tuple(stop - start for start, stop in bounds) or array.dtype != stored:
            raise ValueError(f"{self.name} has another type or shape than described")
        return array if is_plain else array.view(dtype)


def write_arrays(path: str, arrays: Iterable[tuple[str, Bounds | None, np.ndarray[Any, Any]]]) -> None:
    """Write arrays, or chunks of arrays, to a file.

    Args:
        path: the file.
        arrays: the names, the bounds of each chunk (None for a whole array), and the elements. Types that NumPy does
            not know, such as bfloat16, are stored as unsigned integers of the same size.
    """
    import numpy as np

    with zipfile.ZipFile(path, "w") as archive:
        for name, bounds, array in arrays:
            chunk = "" if bounds is None else f"[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            stored = native.view(_integer_of(native.dtype)) if native.dtype.kind == "V" else native
            # ZipInfo has the same date for each file, so equal states are equal files.
            with archive.open(zipfile.ZipInfo(f"{name}{chunk}{_SUFFIX}"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, stored, allow_pickle=False)


@contextmanager
def read_arrays(
    directory: str, names: Iterable[str], described: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, StoredArray]]:
    """Open files of arrays, and return the arrays by name.

    Args:
        directory: the directory, which may come from an untrusted source.
        names: the names of the files.
        described: the ``dtype`` and the ``shape`` of each array, and the notes about it.

    Raises:
        ValueError, zipfile.BadZipFile, StorageError: the files are damaged.
    """
    arrays = {name: _describe(name, entry) for name, entry in described.items()}
    with ExitStack() as stack:
        for file_name in names:
            file = stack.enter_context(os.fdopen(open_regular(directory, file_name), "rb"))
            archive = stack.enter_context(zipfile.ZipFile(file))
            for entry in archive.namelist():
                name = entry.removesuffix(_SUFFIX)
                if name in arrays:
                    bounds: Bounds | None = tuple((0, size) for size in arrays[name].shape)
                else:
                    name, bounds = _parse_chunk(name)
                if bounds is not None and name in arrays and len(bounds) == len(arrays[name].shape):
                    arrays[name]._chunks.append((bounds, archive, entry))
        yield arrays


def _size(part: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in part)


def _overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _describe(name: str, entry: Mapping[str, Any]) -> StoredArray:
    import numpy as np

    notes = dict(entry)
    dtype, shape = notes.pop("dtype", None), notes.pop("shape", None)
    is_intact = isinstance(dtype, str) and isinstance(shape, list) and all(type(size) is int for size in shape)
    try:
        found = np.dtype(dtype) if is_intact else None
    except TypeError:
        found = None
    if found is None or found.hasobject or found.fields is not None or min(shape, default=0) < 0:
        raise ValueError(f"{name} has an invalid type or shape")
    return StoredArray(name, dtype, tuple(shape), notes)


def _parse_chunk(entry: str) -> tuple[str, Bounds | None]:
    match = _CHUNK.fullmatch(entry)
    if match is None:
        return entry, None
    pairs = (pair.split(":") for pair in match[2].split(","))
    return match[1], tuple((int(start), int(stop)) for start, stop in pairs)


def _integer_of(dtype: Any) -> str:
    return f"<u{dtype.itemsize}"
