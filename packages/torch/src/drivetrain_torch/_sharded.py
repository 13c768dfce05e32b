"""Checkpoints in which every rank writes and reads its own part, through ``torch.distributed.checkpoint``.

The files are in the format of that package: a file ``__<rank>_0.distcp`` for each rank, and ``.metadata``, an index
that rank 0 writes. No two ranks write a file of the same name, so the directories of all ranks can be merged into one.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import CheckpointError, ConfigurationError
from drivetrain.plugin.sessions import saved_by_all_ranks

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["load_sharded", "save_sharded"]

_METADATA = ".metadata"


def save_sharded(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save this rank's part of a model and its optimizers. The checkpoint can be loaded on any number of workers.

    Every worker calls this function, and then reports a checkpoint of its directory. drivetrain merges the files of all
    ranks into a complete checkpoint for :func:`load_sharded`. Replicated values, as under ``DistributedDataParallel``,
    are written once. For values that differ between the ranks without being sharded, such as buffers, the values of
    rank 0 are saved.

    Args:
        directory: a directory for this rank alone, or one that all ranks share. It is created if it does not exist.
        model: the model, the same on every worker. It can be plain or wrapped by ``DistributedDataParallel``,
            ``FullyShardedDataParallel`` or ``fully_shard``, on any device.
        optimizers: the optimizers of the model's parameters, or None to save the model alone. A model that is wrapped
            by ``FullyShardedDataParallel`` requires a single optimizer for all of its parameters.
        extra: other values to save, such as the epoch or the state of a learning rate scheduler. They should be small
            and picklable, with tensors on the CPU. The values of rank 0 are saved.

    Raises:
        CheckpointError: the directory already holds a sharded checkpoint, or a rank could not write its part.
        ConfigurationError: the model is not a module, or an optimizer has parameters that are not in the model.

    Example:
        In a train function, on every worker::

            with tempfile.TemporaryDirectory() as directory:
                drivetrain_torch.save_sharded(directory, model, optimizer, extra={"epoch": epoch})
                drivetrain.report({"loss": loss}, checkpoint=drivetrain.Checkpoint.from_directory(directory))
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    chosen = _check_arguments("save_sharded", model, optimizers)
    if os.path.exists(os.path.join(directory, _METADATA)):
        raise CheckpointError(
            f"save_sharded: expected a directory without a checkpoint, got one in {os.fspath(directory)}. "
            "Use a new directory for each checkpoint"
        )
    with _without_torch_warnings():
        weights, training = get_state_dict(model, chosen)
        groups: Any = training.get("param_groups", ())
        state: dict[str, Any] = {"model": weights}
        if chosen:
            state["optimizer"] = {"state": training["state"]}
        if not dist.is_initialized() or dist.get_rank() == 0:
            # A tuple is saved as one entry. Each item of a list or mapping would become a separate entry.
            state["extra"] = tuple((extra or {}).items())
            if chosen:
                state["optimizer"]["param_groups"] = tuple(_on_cpu(group) for group in groups)
        else:
            trained = {name for group in groups for name in group["params"]}
            state["model"] = {name: value for name, value in weights.items() if name in trained or _is_sharded(value)}
        with _raising_first_rank_error("save_sharded could not write the checkpoint"):
            # The files need not be flushed to disk: report() copies them to durable storage.
            save(state, storage_writer=FileSystemWriter(directory, sync_files=False))
    if dist.is_initialized() and _is_of_rank(directory, dist.get_rank()):
        saved_by_all_ranks(directory)


def _is_of_rank(directory: str | os.PathLike[str], rank: int) -> bool:
    """Return True if no other rank has saved its part in this directory: then every rank reports its own directory."""
    return all(name.startswith(f"__{rank}_") for name in os.listdir(directory) if name.endswith(".distcp"))


def load_sharded(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint written by :func:`save_sharded` into a model and its optimizers, in place.

    Every worker calls this function. The number of workers and the wrapper of the model may differ from those when the
    checkpoint was saved. In a process without a process group, the model must not be wrapped. Call this function after
    wrapping the model and creating the optimizers and learning rate schedulers. Existing gradients of the optimizers'
    parameters are discarded.

    Args:
        directory: the directory of the checkpoint, with the files of all ranks that saved it.
        model: the model, as for :func:`save_sharded`.
        optimizers: the optimizers of the model's parameters, or None to load the model alone.

    Returns:
        The ``extra`` values that rank 0 saved.

    Raises:
        CheckpointError: the directory is not a sharded checkpoint, has missing files, or belongs to another model or
            optimizer.
        ConfigurationError: the model is not a module, or an optimizer has parameters that are not in the model.

    Example:
        At the start of a train function, on every worker::

            if (checkpoint := drivetrain.get_checkpoint()) is not None:
                with checkpoint.as_directory() as directory:
                    extra = drivetrain_torch.load_sharded(directory, model, optimizer)
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    chosen = _check_arguments("load_sharded", model, optimizers)
    where = os.fspath(directory)
    metadata = _read_metadata(where)
    if chosen and "optimizer.param_groups" not in metadata.state_dict_metadata:
        raise CheckpointError(
            "[DT-727] load_sharded: expected a checkpoint of a model and its optimizers, got one of a model alone in "
            f"{where}. Call it without optimizers"
        )
    for optimizer in chosen:
        # get_state_dict creates the optimizer state that the checkpoint is loaded into, but only if there are no
        # gradients.
        optimizer.zero_grad()
    with _without_torch_warnings():
        weights, training = get_state_dict(model, chosen)
        state: dict[str, Any] = {"model": weights, "extra": ()}
        if chosen:
            state["optimizer"] = {"state": _with_saved_state(training["state"], metadata), "param_groups": ()}
        # If the planner flattened sharded tensors, the check below would report a tensor as missing when this rank has
        # no part of it.
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, metadata)
        _require_same(planner.state_dict, metadata, where)
        with _raising_first_rank_error(f"load_sharded could not read {where}"):
            load(state, storage_reader=FileSystemReader(where), planner=planner)
        loaded = {**state["optimizer"], "param_groups": list(state["optimizer"]["param_groups"])} if chosen else {}
        set_state_dict(
            model,
            chosen,
            model_state_dict=state["model"],
            optim_state_dict=loaded,
            # strict=True would reject parameters that were never trained, because they have no optimizer state.
            # _require_same has already compared the names.
            options=StateDictOptions(strict=False),
        )
    return dict(state["extra"])


def _check_arguments(function: str, model: object, optimizers: object) -> tuple[torch.optim.Optimizer, ...]:
    """Check the arguments, and return the optimizers as a tuple."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"{function}: expected a torch.nn.Module, got {model!r}")
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = (optimizers,)
    chosen = tuple(optimizers) if isinstance(optimizers, Iterable) else () if optimizers is None else (optimizers,)
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in chosen:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"{function}: expected optimizers of torch.optim, got {optimizer!r}")
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigurationError(
                f"{function}: expected optimizers of the model's own parameters, got {type(optimizer).__name__} with "
                "other parameters. Create it from model.parameters() after wrapping the model"
            )
    return chosen


def _read_metadata(directory: str) -> Metadata:
    """Read the index of a sharded checkpoint, and check that all files of the checkpoint are complete."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    problem = f"[DT-726] load_sharded: expected a checkpoint written by drivetrain_torch.save_sharded, got {directory}"
    try:
        metadata = FileSystemReader(directory).read_metadata()
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        is_foreign = "extra" not in metadata.state_dict_metadata
    except FileNotFoundError:
        raise CheckpointError(
            f"{problem} without {_METADATA}, which rank 0 writes. Pass the directory of a committed checkpoint, to "
            "which every rank has reported its part"
        ) from None
    except Exception as error:  # unpickling arbitrary bytes can raise any exception
        raise CheckpointError(
            f"{problem}, whose {_METADATA} cannot be read ({error!r}). Use another checkpoint"
        ) from error
    if is_foreign:
        raise CheckpointError(f"{problem}, written by other code. Load it with torch.distributed.checkpoint.load")
    if incomplete := sorted(name for name, end in ends.items() if _size(os.path.join(directory, name)) < end):
        raise CheckpointError(
            f"{problem} with missing or truncated files: {_join(incomplete)}. Make every rank report its part, and use "
            "a committed checkpoint"
        )
    return metadata


def _with_saved_state(state: Any, metadata: Metadata) -> dict[str, Any]:
    """Return the optimizer state of the parameters whose state was saved, or of all parameters if none was saved."""
    paths = (metadata.planner_data or {}).values()
    saved = {path[2] for path in paths if path[:2] == ("optimizer", "state")}
    return {name: values for name, values in state.items() if name in saved or not saved}


def _require_same(expected: Mapping[str, Any], metadata: Metadata, directory: str) -> None:
    """Check that a checkpoint has the same entries, with the same shapes, as the model and its optimizers."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    saved = metadata.state_dict_metadata
    compared = ("model.", "optimizer.") if "optimizer.param_groups" in expected else ("model.",)
    missing = [name for name in expected if name not in saved]
    unexpected = [name for name in saved if name.startswith(compared) and name not in expected]
    reshaped = [
        f"{name} of shape {tuple(entry.size)}, not {tuple(value.size())}"
        for name, value in expected.items()
        if isinstance(value, torch.Tensor)
        and isinstance(entry := saved.get(name), TensorStorageMetadata)
        and entry.size != value.size()
    ]
    sides = [("without", missing), ("with", unexpected), ("with", reshaped)]
    if differences := [f"{side} {_join(names)}" for side, names in sides if names]:
        described, pronoun = ("model and optimizer", "them") if len(compared) == 2 else ("model", "it")
        raise CheckpointError(
            f"[DT-727] load_sharded: expected a checkpoint of this {described}, got {directory} "
            f"{'; '.join(differences)}. Create {pronoun} with the same structure as when the checkpoint was saved"
        )


def _is_sharded(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor


def _on_cpu(group: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return -1


def _join(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


@contextlib.contextmanager
def _raising_first_rank_error(summary: str) -> Iterator[None]:
    """Raise a CheckpointError with the exception of the first failed rank.

    The exception that torch raises contains the exceptions of all failed ranks, with tracebacks.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"{summary}: rank {rank} raised {type(cause).__name__}: {cause}") from cause


@contextlib.contextmanager
def _without_torch_warnings() -> Iterator[None]:
    """Hide warnings that torch's own code causes, for example by its use of deprecated functions in FSDP1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=rf"torch\.|{__name__}")
        yield
