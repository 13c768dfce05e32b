"""Checkpoints that are a dict of values: ``save_checkpoint(epoch=3, model=...)``."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from drivetrain import Checkpoint, CheckpointError, SessionError
from drivetrain.plugin.reading import open_regular, too_large
from drivetrain.plugin.sessions import Session, UploadRequest, active_session, plain_metrics

__all__ = ["DICT_FILE", "dump", "load", "load_checkpoint", "save_checkpoint"]

DICT_FILE = "dict_checkpoint.pkl"

_own_values: weakref.WeakKeyDictionary[Session, tuple[Checkpoint | None, bytes]] = weakref.WeakKeyDictionary()
"""For a rank that stores no files: the pickled values of its last :func:`save_checkpoint`, and the checkpoint that
``get_checkpoint()`` returned then, so that a newer checkpoint takes precedence."""

_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def save_checkpoint(**values: Any) -> None:
    """Save a dict of values as a checkpoint, from inside a train function.

    Call it on all ranks; only the values of rank 0 are saved, and the call is not a barrier. The checkpoint is
    committed and retained like a checkpoint of :func:`~drivetrain.report`. In the same attempt,
    :func:`load_checkpoint` returns to each rank the values that this rank has passed. The call does not count as an
    iteration: metrics files and callbacks receive no report.

    Args:
        **values: values that can be pickled. :class:`~drivetrain_interactive.CheckpointStrategy` can rank checkpoints
            by a value that is a number or a string. A tensor that was saved on a GPU is loaded onto the same GPU again,
            on every rank. Move the tensors of ``model.state_dict()`` to the CPU before you save them.

    Raises:
        SessionError: called outside a train function.
        StorageError: the checkpoint could not be stored.

    Example:
        At the end of each epoch::

            state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            drivetrain_interactive.save_checkpoint(epoch=epoch, model=state)
    """
    session = active_session("save_checkpoint")
    if session.context.get_world_rank() != 0:
        _own_values[session] = session.checkpoint, dump(values)
        session.report({}, quiet=True)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint_") as directory:
        Path(directory, DICT_FILE).write_bytes(dump(values))
        upload = UploadRequest(checkpoint=Checkpoint.from_directory(directory), delete_local=True)
        session.report(_rankable(values), upload, quiet=True)
        os.makedirs(directory, exist_ok=True)  # it may have been moved, but the context manager will delete it


def load_checkpoint() -> dict[str, Any] | None:
    """Return the values that this rank has saved last, or else the values of the checkpoint to resume from.

    After a failure, all ranks receive the values of rank 0. This unpickles the checkpoint, which can execute code:
    resume only from checkpoints that you trust.

    Returns:
        The values; None if nothing was saved and the run does not resume from a checkpoint.

    Raises:
        SessionError: called outside a train function.
        CheckpointError: the checkpoint was not saved by :func:`save_checkpoint`, but by :func:`~drivetrain.report`.
    """
    session = active_session("load_checkpoint")
    checkpoint = session.checkpoint
    before, own = _own_values.get(session, (None, None))
    if own is not None and before is checkpoint:
        values: dict[str, Any] = pickle.loads(own)
        return values
    return None if checkpoint is None else load(checkpoint, "load_checkpoint()", "get_checkpoint()")


def dump(values: Mapping[str, Any]) -> bytes:
    """Pickle values, as the content of the file that a dict checkpoint consists of."""
    data: bytes = cloudpickle.dumps(dict(values))
    return data


def load(checkpoint: Checkpoint, caller: str, alternative: str) -> dict[str, Any]:
    """Unpickle the values of a dict checkpoint.

    Args:
        checkpoint: the checkpoint.
        caller: the function or property that the user called, for the error message.
        alternative: the function or property for checkpoints of another kind, for the error message.

    Raises:
        CheckpointError: the checkpoint was not saved by :func:`save_checkpoint`.
        StorageError: the file is not a regular file, or is larger than the memory of this machine.
    """
    with checkpoint.as_directory() as directory:
        try:
            descriptor = open_regular(directory, DICT_FILE)
        except FileNotFoundError:
            raise CheckpointError(
                f"{caller}: expected a checkpoint of save_checkpoint(), got the directory {checkpoint.path} without "
                f"{DICT_FILE}. Use {alternative}"
            ) from None
        with open(descriptor, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MEMORY_BYTES:
                raise too_large(os.path.join(directory, DICT_FILE), size, _MEMORY_BYTES)
            values: dict[str, Any] = pickle.load(file)
    return values


def _rankable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by which checkpoints can be ranked."""
    metrics: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, (Mapping, list, tuple)):
            continue
        try:
            metrics.update(plain_metrics({name: value}))
        except SessionError:  # a value that is saved but cannot be a metric
            continue
    return metrics
