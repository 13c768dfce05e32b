"""The files with the state of each rank that drivetrain adds to the checkpoints of Accelerate and of a ``Trainer``.

They consist of numbers, strings and tensors. Loading them unpickles nothing else.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drivetrain import CheckpointError, get_context

__all__ = ["read_state", "write_state"]

_RANKS = "ranks"


def write_state(directory: str, name: str, state: Mapping[str, Any]) -> None:
    """Write the state of this rank to a directory."""
    context = get_context()
    path = os.path.join(directory, f"{name}_{context.get_world_rank()}.pt")
    torch.save({**state, _RANKS: context.get_world_size()}, path)


def read_state(directory: str, name: str, entries: Sequence[str]) -> tuple[dict[str, Any] | None, bool]:
    """Read the state of this rank from a directory.

    Args:
        directory: the directory, which may come from an untrusted source.
        name: the name that :func:`write_state` received.
        entries: the names of the entries.

    Returns:
        The state, or None if there is none; and True if it is that of this rank. With another number of ranks, it is
        the state of rank 0.

    Raises:
        CheckpointError: the file is damaged.
    """
    context = get_context()
    for rank in (context.get_world_rank(), 0):
        path = os.path.join(directory, f"{name}_{rank}.pt")
        if not os.path.isfile(path):
            continue
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            state = {entry: state[entry] for entry in (_RANKS, *entries)}
            is_own = state[_RANKS] == context.get_world_size()
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"[DT-409] {path}: expected the state of a rank, got a damaged file: {error}. Use another checkpoint"
            ) from error
        if is_own or rank == 0:
            return state, is_own
    return None, False
