"""The index of a sharded checkpoint: which part of which tensor is at which place of which file, as JSON.

``torch.distributed.checkpoint`` writes the tensors to a file ``__<rank>_0.distcp`` for each rank, and an index,
``.metadata``, which is a pickle: reading it could execute code. :class:`IndexWriter` writes :data:`INDEX` as well, and
:class:`IndexReader` reads only this file. ``.metadata`` is there for programs that read the checkpoint without
drivetrain. Each tensor in the data files is a file of ``torch.save`` that is read with ``weights_only=True``.

The safetensors storage of ``torch.distributed.checkpoint`` needs no pickle either, but it requires another package and
a version of torch that is newer than the oldest one that this package supports.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from drivetrain import CheckpointError, StorageError
from drivetrain.plugin.reading import open_regular

__all__ = ["INDEX", "IndexReader", "IndexWriter", "read_index"]

INDEX = "sharded.json"
_FORMAT = 1
_FILE_NAME = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_MAX_DIMENSIONS = 64
_MAX_NUMBER = 1 << 62


class IndexWriter(FileSystemWriter):
    """Writes a checkpoint that consists of tensors, with an index as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write both index files. Called on rank 0 when all ranks have written their files."""
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            parts = []
            for chunk in entry.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                at = [place.relative_path, place.offset, place.length]
                parts.append([list(chunk.offsets), list(chunk.sizes), *at])
            kind = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(entry.size), "dtype": kind, "parts": parts}
        with open(os.path.join(self.path, INDEX), "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "tensors": tensors}, file)


class _Place(NamedTuple):
    """The place of a part of a tensor.

    Attributes:
        file: the name of the file.
        offset: the position of the first byte.
        length: the number of bytes.
        sizes: the shape of the part.
        dtype: the type of its elements.
    """

    file: str
    offset: int
    length: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class IndexReader(StorageReader):
    """Reads the tensors of a checkpoint whose index was checked.

    Args:
        directory: the directory of the checkpoint.
        metadata: the return value of :func:`read_index`.
    """

    def __init__(self, directory: str, metadata: Metadata) -> None:
        super().__init__()
        self._directory = directory
        self._metadata = metadata
        self._places: dict[MetadataIndex, _Place] = metadata.storage_data

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the object reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts that this rank needs into its tensors."""
        by_file: dict[str, list[tuple[_Place, ReadItem]]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            by_file.setdefault(place.file, []).append((place, item))
        for name, items in by_file.items():
            with open(open_regular(self._directory, name), "rb") as file:
                for place, item in items:
                    file.seek(place.offset)
                    tensor = _load_part(file.read(place.length), place, name)
                    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        tensor = tensor.narrow(dimension, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: the object is never selected by the path of a checkpoint."""
        return False


def _load_part(data: bytes, place: _Place, file: str) -> torch.Tensor:
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != place.sizes or tensor.dtype != place.dtype:
        raise CheckpointError(f"{file} has another tensor at byte {place.offset} than {INDEX} says")
    return tensor


def read_index(directory: str) -> Metadata:
    """Read and check the index of a checkpoint, which may come from an untrusted source.

    Args:
        directory: the directory of the checkpoint.

    Returns:
        The index as ``torch.distributed.checkpoint`` represents it. The files that it names exist and are complete.

    Raises:
        FileNotFoundError: there is no index.
        CheckpointError: the index or a data file is damaged, or a newer version of drivetrain has written it.
    """
    where = os.path.join(directory, INDEX)
    try:
        with open(open_regular(directory, INDEX), "rb") as file:
            index = _mapping(json.load(file))
        if index["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {index['format']!r:.80}")
        found = Metadata(state_dict_metadata={}, storage_data={})
        for name, entry in _mapping(index["tensors"]).items():
            found.state_dict_metadata[name] = _read_entry(name, _mapping(entry), found.storage_data)
    except (ValueError, TypeError, LookupError, RecursionError, StorageError) as error:
        raise CheckpointError(
            f"[DT-726] {where}: expected the index of a sharded checkpoint, got a damaged or a newer file ({error}). "
            "Use another checkpoint, or install the version of drivetrain that has written it"
        ) from error
    _require_files(directory, found.storage_data)
    return found


def _read_entry(name: str, entry: Mapping[str, Any], places: dict[MetadataIndex, _Place]) -> TensorStorageMetadata:
    """Return the description of a tensor, and add the places of its parts to ``places``."""
    shape, dtype = _numbers(entry["shape"]), _DTYPES[entry["dtype"]]
    if len(shape) > _MAX_DIMENSIONS or not isinstance(entry["parts"], list):
        raise ValueError(f"the entry {name!r:.80} has an impossible shape or no parts")
    chunks = []
    for offsets_of_part, sizes_of_part, file, offset, length in entry["parts"]:
        offsets, sizes = _numbers(offsets_of_part), _numbers(sizes_of_part)
        ends = [start + size for start, size in zip(offsets, sizes, strict=True)]
        is_inside = len(ends) == len(shape) and all(end <= size for end, size in zip(ends, shape, strict=True))
        if not is_inside or not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise ValueError(f"the entry {name!r:.80} has a part outside of the tensor, or in a file {file!r:.80}")
        _numbers([offset, length])
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[MetadataIndex(name, torch.Size(offsets))] = _Place(file, offset, length, tuple(sizes), dtype)
    _require_cover(name, shape, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def _require_cover(name: str, shape: list[int], chunks: list[ChunkStorageMetadata]) -> None:
    """Check that the parts of a tensor have as many elements as the tensor: a gap would leave a parameter unloaded."""
    elements = sum(chunk.sizes.numel() for chunk in chunks)
    if elements != torch.Size(shape).numel():
        raise ValueError(f"the parts of {name!r:.80} have {elements} elements, not {torch.Size(shape).numel()}")


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.80}")
    return value


def _numbers(values: object) -> list[int]:
    """Return a list of integers that are not negative."""
    if not isinstance(values, list) or not all(type(each) is int and 0 <= each <= _MAX_NUMBER for each in values):
        raise ValueError(f"expected a list of integers >= 0, got {values!r:.80}")
    return values


def _require_files(directory: str, places: Mapping[MetadataIndex, _Place]) -> None:
    """Check that all parts are inside their files."""
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    if incomplete := sorted(name for name, end in ends.items() if _size(directory, name) < end):
        shown = ", ".join(incomplete[:3]) + (f" and {len(incomplete) - 3} more" if len(incomplete) > 3 else "")
        raise CheckpointError(
            f"[DT-726] {directory}: expected the files of all ranks, got missing or truncated files: {shown}. Make "
            "every rank report its part, and use a committed checkpoint"
        )


def _size(directory: str, name: str) -> int:
    try:
        with open(open_regular(directory, name), "rb") as file:
            return os.fstat(file.fileno()).st_size
    except (OSError, StorageError):
        return -1
