"""The files of a training state that consists of named arrays, as in JAX and Keras.

Rank 0 writes ``state.json``, with the common entries, the type and shape of each array, and the states of other
objects; and ``state.npz``, with the arrays. Each other rank that has a part of an array writes it to
``state_<rank>.npz``. Every rank writes its random states and data positions to ``rank_<rank>.json``, so the ranks need
not exchange anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain._storage.reading import open_regular
from drivetrain._worker.arrayfiles import Bounds, StoredArray, read_arrays, write_arrays
from drivetrain._worker.jsonvalues import from_json, to_json
from drivetrain._worker.session import current_session
from drivetrain._worker.state import Differences, StateFiles
from drivetrain.errors import CheckpointError, ConfigurationError, StorageError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ArrayEntry", "ArrayFiles"]

_STATE = "state.json"
_ARRAYS, _OBJECTS = "arrays", "objects"
_REMEDY = (
    "Create the TrainState with the same parts as when it was saved, or load the parameters that agree in a new run, "
    "with state.load(checkpoint, strict=False)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayEntry:
    """An array of the state.

    Attributes:
        dtype: the name of its type.
        shape: its shape.
        notes: what else :meth:`ArrayFiles.assign` needs to know about it: values that JSON can represent.
        is_chunked: True if each rank has only parts of it.
        parts: the parts to write on this rank, with their bounds: the whole array, with None, unless it is chunked.
    """

    dtype: str
    shape: tuple[int, ...]
    notes: Mapping[str, Any]
    is_chunked: bool
    parts: Iterable[tuple[Bounds | None, np.ndarray[Any, Any]]]


class ArrayFiles(StateFiles):
    """Writes and reads named arrays, and the states of objects. The plugin of a framework derives a class from it.

    Args:
        objects: other parts by name, each with ``state_dict`` and ``load_state_dict``, whose states consist of numbers,
            strings, arrays, and lists and mappings of them.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    @abstractmethod
    def entries(self, *, only_parameters: bool) -> dict[str, ArrayEntry]:
        """Return the arrays by name. Called on every rank.

        Args:
            only_parameters: see :meth:`StateFiles.read`.
        """

    @abstractmethod
    def assign(self, arrays: Mapping[str, StoredArray]) -> None:
        """Load arrays that agree with those of :meth:`entries`. Called on every rank.

        Raises:
            ValueError, TypeError: an array is damaged.
        """

    def agrees(self, entry: ArrayEntry, stored: StoredArray) -> bool:
        """Return True if a stored array can be loaded."""
        return (entry.dtype, entry.shape) == (stored.dtype, stored.shape)

    @property
    def is_written_by_all_ranks(self) -> bool:
        """True: every rank writes its own random states."""
        return True

    def gather(self, value: Any) -> list[Any]:
        """Return the value of this rank alone, which :meth:`write` stores in a file of the rank."""
        return [value]

    def write(self, directory: str, common: Mapping[str, Any], *, verify: bool) -> None:
        """Write the files of this rank. Only values that can be read back are accepted, so ``verify`` has no effect."""
        session = current_session()
        assert session is not None
        rank, count = session.context.get_world_rank(), session.context.get_world_size()
        entries = self.entries(only_parameters=False)
        chunked = {name: entry for name, entry in entries.items() if entry.is_chunked}
        arrays = entries if rank == 0 else chunked
        if arrays:
            file = os.path.join(directory, _arrays_file(rank))
            write_arrays(file, ((name, *part) for name, entry in arrays.items() for part in entry.parts))
        _write_json(directory, _rank_file(rank), to_json(common["ranks"][0], "the states of the rank"))
        if rank == 0:
            objects = {name: to_json(part.state_dict(), name) for name, part in self._objects.items()}
            described = {
                name: {"dtype": entry.dtype, "shape": list(entry.shape), **entry.notes}
                for name, entry in entries.items()
            }
            _write_json(directory, _STATE, {**common, "ranks": count, _ARRAYS: described, _OBJECTS: objects})

    def read(self, directory: str, *, only_parameters: bool, strict: bool) -> tuple[Any, Differences]:
        """Read the files, and load the arrays and the states of objects."""
        problem = f"[DT-814] TrainState: expected a checkpoint written by TrainState.save, got {directory}"
        try:
            saved: Any = _read_json(directory, _STATE)
        except FileNotFoundError:
            raise CheckpointError(
                f"{problem} without {_STATE}. Load it with the code that has written it, before or without this call"
            ) from None
        except _DAMAGE as error:
            raise CheckpointError(f"{problem}, whose {_STATE} is damaged ({error}). Use another checkpoint") from error
        if not isinstance(saved, dict) or "format" not in saved:
            return saved, Differences([], [], [])  # which the caller refuses
        with _damage_as_error(directory):
            saved = {**saved, "ranks": [_read_json(directory, _rank_file(rank)) for rank in range(saved["ranks"])]}
            files = [_arrays_file(rank) for rank in range(len(saved["ranks"]))]
            present = [name for name in files if os.path.lexists(os.path.join(directory, name))]
            with read_arrays(directory, present, saved[_ARRAYS]) as arrays:
                return saved, self._load(arrays, saved[_OBJECTS], directory, only_parameters, strict)

    def _load(
        self,
        arrays: Mapping[str, StoredArray],
        objects: Mapping[str, Any],
        directory: str,
        only_parameters: bool,
        strict: bool,
    ) -> Differences:
        entries = self.entries(only_parameters=only_parameters)
        own_objects = {} if only_parameters else self._objects
        own, its = {*entries, *own_objects}, {*arrays, *objects}
        known = [name for name in entries if name in arrays]
        reshaped = [name for name in known if not self.agrees(entries[name], arrays[name])]
        differences = Differences(
            missing=sorted(own - its),
            unexpected=[] if only_parameters else sorted(its - own),
            reshaped=[f"{name}: {_describe(arrays[name])}, not {_describe(entries[name])}" for name in reshaped],
        )
        if differences and strict:
            raise CheckpointError(
                f"[DT-814] TrainState: expected a checkpoint of this state, got {directory} {differences}. {_REMEDY}"
            )
        self.assign({name: arrays[name] for name in known if name not in reshaped})
        for name, part in own_objects.items():
            part.load_state_dict(objects[name])
        return differences


def _rank_file(rank: int) -> str:
    return f"rank_{rank}.json"


def _arrays_file(rank: int) -> str:
    return f"state_{rank}.npz" if rank else "state.npz"


def _describe(array: ArrayEntry | StoredArray) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _write_json(directory: str, name: str, value: Any) -> None:
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        json.dump(value, file)


def _read_json(directory: str, name: str) -> Any:
    with open(open_regular(directory, name), encoding="utf-8") as file:
        return from_json(json.load(file))


_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, RuntimeError, EOFError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, FileNotFoundError, StorageError),
)
"""The errors that damaged files cause. ``zipfile`` raises ``NotImplementedError`` for an unknown compression."""


@contextlib.contextmanager
def _damage_as_error(directory: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except _DAMAGE as error:
        raise CheckpointError(
            f"[DT-814] TrainState: expected a checkpoint written by TrainState.save, got {directory}, which is damaged "
            f"({error}). Use another checkpoint"
        ) from error
