"""Reads the files of a checkpoint as named values. Nothing is unpickled; a file that would require it stays bytes.

Each kind of file has one function, which returns the values by their names, and one :class:`_Format` at the end of this
module. An index whose values are in other files, as of a sharded checkpoint, has a pattern of their names.
"""

from __future__ import annotations

import filecmp
import fnmatch
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.plugin.files import LISTING_FILE, METADATA_FILE, PIN_FILE

__all__ = ["Tensor", "have_same_bytes", "list_files", "read_values"]

_SKIPPED = (LISTING_FILE, PIN_FILE)
_PICKLED_INDEX = ".metadata"
"""The index of ``torch.distributed.checkpoint``. It names temporary objects, so equal checkpoints may differ in it."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor or an array of a checkpoint.

    Attributes:
        dtype: the name of its data type.
        shape: its shape.
        data: its bytes.
        numbers: returns it as an array of NumPy with numbers that can be subtracted; None if there is no such array.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    numbers: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Format:
    """A kind of file.

    Attributes:
        read: returns the values in a file.
        parts: a pattern of the names of other files in the same directory that ``read`` reads as well.
    """

    read: Callable[[Path], Values]
    parts: str = ""


def list_files(directory: Path) -> list[str]:
    """Return the relative paths of the files of a checkpoint that count, sorted, without the parts of an index."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    parts = {part for path in files for part in _parts_of(path)}
    return [
        path.relative_to(directory).as_posix()
        for path in files
        if path not in parts and path.name not in (*_SKIPPED, _PICKLED_INDEX)
    ]


def have_same_bytes(one: Path, other: Path) -> bool:
    """Return True if two files, and the files that they refer to, have the same content."""
    pairs = [(one, other), *zip(_parts_of(one), _parts_of(other), strict=False)]
    same_parts = [path.name for path in _parts_of(one)] == [path.name for path in _parts_of(other)]
    return same_parts and all(filecmp.cmp(*pair, shallow=False) for pair in pairs)


def read_values(path: Path) -> Values | None:
    """Return the values in a file by their names; None if the file can only be compared as bytes."""
    found = _format_of(path)
    if found is None:
        return None
    try:
        return found.read(path)
    except Exception:  # the file may be of another format than its name says, or require unpickling
        return None


def _format_of(path: Path) -> _Format | None:
    return _BY_NAME.get(path.name) or _BY_SUFFIX.get(path.suffix)


def _parts_of(path: Path) -> list[Path]:
    """Return the other files that belong to a file, sorted."""
    found = _format_of(path)
    if found is None or not found.parts:
        return []
    return sorted(other for other in path.parent.iterdir() if fnmatch.fnmatchcase(other.name, found.parts))


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}[{index}]")
    else:
        yield name, value


def _read_torch(path: Path) -> Values:
    import torch

    loaded = torch.load(path, weights_only=True, map_location="cpu")
    values = dict(_flatten(loaded))
    return {name: _of_torch(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _of_torch(tensor: Any) -> Tensor:
    import torch

    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    numbers = None
    if tensor.is_floating_point() or not tensor.is_complex():
        numbers = lambda: tensor.double().numpy()  # noqa: E731 - a function of one expression
    return Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data, numbers)


def _of_numpy(array: Any) -> Any:
    if array.dtype.hasobject:
        raise ValueError("an array of objects requires unpickling")
    is_number = array.dtype.kind in "biuf"
    return Tensor(
        str(array.dtype),
        array.shape,
        array.tobytes(),
        (lambda: array.astype("float64")) if is_number else None,
    )


def _read_npz(path: Path) -> Values:
    import numpy as np

    if not zipfile.is_zipfile(path):
        return {"": _of_numpy(np.load(path, allow_pickle=False))}
    with np.load(path, allow_pickle=False) as arrays:
        return {name: _of_numpy(arrays[name]) for name in arrays.files}


def _read_safetensors(path: Path) -> Values:
    """Read a file of the format ``safetensors``: the length of a JSON header, the header, and the bytes of tensors."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    values: Values = dict(_flatten(header.pop("__metadata__", {}), "__metadata__"))
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        dtype, data = entry["dtype"], content[start:stop]
        values[name] = Tensor(_NAMES.get(dtype, dtype), tuple(entry["shape"]), data, _numbers_of(dtype, data))
    return values


_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
}
"""For the data types of safetensors, their names in torch and NumPy."""


def _numbers_of(dtype: str, data: bytes) -> Callable[[], Any] | None:
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
    if dtype not in kind and dtype != "BF16":
        return None

    def convert() -> Any:
        import numpy as np

        if dtype == "BF16":  # the upper half of a float32
            return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype("float64")
        return np.frombuffer(data, kind[dtype]).astype("float64")

    return convert


def _read_json(path: Path) -> Values:
    return dict(_flatten(json.loads(path.read_text(encoding="utf-8"))))


_PARAMETERS_OF_AN_ATTEMPT = ("[machines: ", "[local_listen_port: ", "[num_iterations: ")
"""The lines of a model of LightGBM with the addresses of the workers, and with the number of rounds since a restart."""


def _read_lines(path: Path) -> Values:
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[:1] == ["tree"]:  # a model of LightGBM
        lines = [line for line in lines if not line.startswith(_PARAMETERS_OF_AN_ATTEMPT)]
    return {f"line {number}": line for number, line in enumerate(lines, start=1)}


def _read_xgboost(path: Path) -> Values:
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(path)
    return dict(_flatten(json.loads(bytes(booster.save_raw("json")))))


def _read_sharded(path: Path) -> Values:
    """Read the index that ``TrainState`` writes for sharded models, and put the parts of each tensor together."""
    import torch

    values: Values = {}
    for name, entry in json.loads(path.read_bytes())["tensors"].items():
        whole = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for offsets, sizes, file, start, length in entry["parts"]:
            with path.with_name(os.path.basename(file)).open("rb") as stream:
                stream.seek(start)
                part = torch.load(io.BytesIO(stream.read(length)), weights_only=True, map_location="cpu")
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = part
        values[name] = _of_torch(whole)
    return values


_BY_SUFFIX: dict[str, _Format] = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), _Format(_read_torch)),
    **dict.fromkeys((".npz", ".npy"), _Format(_read_npz)),
    ".safetensors": _Format(_read_safetensors),
    ".json": _Format(_read_json),
    **dict.fromkeys((".ubj", ".xgb"), _Format(_read_xgboost)),
    **dict.fromkeys((".txt", ".csv", ".yaml", ".yml"), _Format(_read_lines)),
}
_BY_NAME: dict[str, _Format] = {
    METADATA_FILE: _Format(_read_json),
    "sharded.json": _Format(_read_sharded, parts="__*.distcp"),
}
"""Files whose name says more than their suffix."""
