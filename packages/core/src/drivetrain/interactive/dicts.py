"""Checkpoints that are a dict of values: ``save_checkpoint(epoch=3, model=...)``."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.reading import open_regular, too_large
from drivetrain._worker.metrics import plain_metrics
from drivetrain._worker.session import active_session
from drivetrain._worker.uploads import UploadRequest
from drivetrain.errors import CheckpointError, SessionError

__all__ = ["DICT_FILE", "dump", "load", "load_checkpoint", "save_checkpoint"]

DICT_FILE = "dict_checkpoint.pkl"

_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def save_checkpoint(**values: Any) -> None:
    """Saves a dict of values as a checkpoint, from inside a train function.

    All ranks must call it; only rank 0's values are saved, and it is not a barrier. The checkpoint is
    committed as one of :func:`~drivetrain.report` is, with the same retention, and :func:`load_checkpoint` gives it
    back. It is no iteration: metrics files and callbacks do not get a line for it.

    Args:
        **values: what can be pickled. A number or a string may be what
            :class:`~drivetrain.CheckpointStrategy` ranks checkpoints by. A tensor on a GPU comes back there, so save
            ``model.state_dict()`` on the CPU.

    Raises:
        SessionError: called outside a train function.
        StorageError: it could not be stored.

    Example:
        At the end of each epoch::

            drivetrain.save_checkpoint(epoch=epoch, model=model.state_dict())
    """
    session = active_session("save_checkpoint")
    if session.context.get_world_rank() != 0:
        session.report({}, quiet=True)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint_") as directory:
        Path(directory, DICT_FILE).write_bytes(dump(values))
        upload = UploadRequest(checkpoint=Checkpoint.from_directory(directory), delete_local=True)
        session.report(_rankable(values), upload, quiet=True)
        os.makedirs(directory, exist_ok=True)  # it may have been moved, and is about to be deleted


def load_checkpoint() -> dict[str, Any] | None:
    """The values of the checkpoint to continue from: see :func:`~drivetrain.get_checkpoint` for which one that is.

    This unpickles the checkpoint, which can execute code: continue only from checkpoints that you trust.

    Returns:
        None at the start of a run that continues from nothing.

    Raises:
        SessionError: called outside a train function.
        CheckpointError: the checkpoint is a directory that :func:`~drivetrain.report` was given.
    """
    checkpoint = active_session("load_checkpoint").checkpoint
    return None if checkpoint is None else load(checkpoint, "load_checkpoint()", "get_checkpoint()")


def dump(values: Mapping[str, Any]) -> bytes:
    """The content of the file of a dict checkpoint."""
    data: bytes = cloudpickle.dumps(dict(values))
    return data


def load(checkpoint: Checkpoint, asked: str, instead: str) -> dict[str, Any]:
    """Unpickles the values of a dict checkpoint.

    Args:
        checkpoint: the checkpoint.
        asked: what was called, for the error about another kind of checkpoint.
        instead: what gives such a one.

    Raises:
        CheckpointError: it is another kind of checkpoint.
        StorageError: the file is not a regular file, or is larger than the memory of this machine.
    """
    with checkpoint.as_directory() as directory:
        try:
            with open(open_regular(directory, DICT_FILE), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > _MEMORY_BYTES:
                    raise too_large(os.path.join(directory, DICT_FILE), size, _MEMORY_BYTES)
                values: dict[str, Any] = pickle.load(file)
        except FileNotFoundError:
            raise CheckpointError(
                f"{asked}: expected a checkpoint of save_checkpoint(), got the directory {checkpoint.path} without a "
                f"{DICT_FILE}: use {instead}"
            ) from None
    return values


def _rankable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by which checkpoints can be ranked."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, (Mapping, list, tuple)):
            continue
        try:
            found.update(plain_metrics({name: value}))
        except SessionError:  # this value can only be saved
            continue
    return found
