"""The file ``state.pt`` of a checkpoint, which ``torch.load`` reads with ``weights_only=True``.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain import CheckpointError, StorageError
from drivetrain.plugin.reading import open_regular

__all__ = ["STATE", "on_cpu", "read_state", "write_state"]

STATE = "state.pt"


def write_state(directory: str, entries: Mapping[str, Any], *, verify: bool) -> None:
    """Write entries to the file.

    Args:
        directory: the directory of the checkpoint.
        entries: the entries by name.
        verify: True to load the file, so that an entry that cannot be loaded is found now and not after a failure.

    Raises:
        CheckpointError: an entry cannot be saved, or cannot be loaded with ``weights_only=True``.
    """
    path = os.path.join(directory, STATE)
    entries = on_cpu(dict(entries))
    try:
        torch.save(entries, path)
        if verify:
            torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # the methods of a user's class, called by pickle, may raise anything
        where, value = _find_unreadable("", entries)
        raise CheckpointError(
            "[DT-813] the training state cannot be restored: expected tensors, numbers, strings and containers of "
            f"them, which torch.load(..., weights_only=True) reads, got {value!r:.100} of type "
            f"{type(value).__qualname__} in {where or 'it'}. Change the state_dict() that returns this entry"
        ) from error


def _find_unreadable(path: str, value: Any) -> tuple[str, Any]:
    """Return the innermost value that cannot be written and loaded, with its path. The value itself cannot be."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, inner in items:
        try:
            file = io.BytesIO()
            torch.save(inner, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:  # see write_state()
            return _find_unreadable(f"{path}[{key!r}]" if path else str(key), inner)
    return path, value


def read_state(directory: str, problem: str) -> Any:
    """Read the file, which may come from an untrusted source.

    Args:
        directory: the directory of the checkpoint.
        problem: the beginning of the error message, which says what was expected.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with open(open_regular(directory, STATE), "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{problem} without {STATE}. Load it with the code that has written it, before or without this call"
        ) from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError, StorageError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{problem}, whose {STATE} cannot be read ({reason}). Use another checkpoint") from error


def on_cpu(value: Any, _copies: dict[Any, torch.Tensor] | None = None) -> Any:
    """Return a value with all tensors on the CPU, so that it can be loaded anywhere.

    Tensors that share their memory, such as tied weights, still do so in the result. A part of a larger tensor is
    copied, because ``torch.save`` would write the whole tensor.
    """
    copies = {} if _copies is None else _copies
    if isinstance(value, torch.Tensor):
        return _tensor_on_cpu(value.detach(), copies)
    if type(value) in (dict, OrderedDict):
        return {key: on_cpu(inner, copies) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_cpu(inner, copies) for inner in value)
    return value


def _tensor_on_cpu(tensor: torch.Tensor, copies: dict[Any, torch.Tensor]) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return tensor.cpu()
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" and not is_part:
        return tensor
    key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    if key not in copies:
        copies[key] = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
    return copies[key]
