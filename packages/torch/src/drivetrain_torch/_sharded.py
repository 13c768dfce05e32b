"""Checkpoints of which every rank writes and reads its own part, through ``torch.distributed.checkpoint``.

The files are that package's: ``__<rank>_0.distcp`` of each rank, and rank 0's ``.metadata``, which says what is where.
No two ranks write a file of the same name, so the directories of all ranks can be merged into one.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import CheckpointError, ConfigurationError

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
    """Writes this rank's part of a model and its optimizers, for :func:`load_sharded` on any number of workers.

    Every worker calls it, and then reports a checkpoint of its directory: only merged are the files a whole. What is
    replicated, as under ``DistributedDataParallel``, is written once. What each rank has its own of, such as buffers,
    is taken from rank 0.

    Args:
        directory: a directory of this rank's own, or one that all ranks share; it is made where it is missing.
        model: the model, the same on every worker, plain or wrapped: ``DistributedDataParallel``,
            ``FullyShardedDataParallel``, ``fully_shard``, in any device's memory.
        optimizers: of the model's parameters; None to save the model alone. ``FullyShardedDataParallel`` wants one
            optimizer for all of them.
        extra: what else to keep, such as the epoch, or the state of a learning rate scheduler: small values that can
            be pickled, tensors on the CPU. Rank 0's are kept.

    Raises:
        CheckpointError: the directory holds a sharded checkpoint already, or a rank could not write its part.
        ConfigurationError: the model is no module, or an optimizer has parameters that are not the model's.

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

    chosen = _checked("save_sharded", model, optimizers)
    if os.path.exists(os.path.join(directory, _METADATA)):
        raise CheckpointError(
            f"save_sharded: expected a directory without a checkpoint, got one in {os.fspath(directory)}: "
            "give each checkpoint a directory of its own"
        )
    with _without_torchs_warnings():
        weights, training = get_state_dict(model, chosen)
        groups: Any = training.get("param_groups", ())
        state: dict[str, Any] = {"model": weights}
        if chosen:
            state["optimizer"] = {"state": training["state"]}
        if not dist.is_initialized() or dist.get_rank() == 0:
            # As tuples, which are saved whole: each item of a list or mapping would become an entry of its own.
            state["extra"] = tuple((extra or {}).items())
            if chosen:
                state["optimizer"]["param_groups"] = tuple(_on_cpu(group) for group in groups)
        else:
            trained = {name for group in groups for name in group["params"]}
            state["model"] = {name: value for name, value in weights.items() if name in trained or _is_sharded(value)}
        with _told_by_rank("save_sharded could not write the checkpoint"):
            # Not flushed to the disk: what lasts is the copy that report() makes.
            save(state, storage_writer=FileSystemWriter(directory, sync_files=False))


def load_sharded(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Loads what :func:`save_sharded` wrote into a model and its optimizers, in place.

    Every worker calls it. The number of workers, and what wraps the model, need not be as they were when it was saved;
    a process without a process group loads into a plain model. Call it after the model is wrapped and optimizers and
    learning rate schedulers are made; gradients are dropped.

    Args:
        directory: the checkpoint, with the files of all ranks that saved it.
        model: the model, as for :func:`save_sharded`.
        optimizers: of the model's parameters; None to load the model alone.

    Returns:
        The ``extra`` of rank 0 when it was saved.

    Raises:
        CheckpointError: the directory is no sharded checkpoint, lacks files, or is one of another model or optimizer.
        ConfigurationError: the model is no module, or an optimizer has parameters that are not the model's.

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

    chosen = _checked("load_sharded", model, optimizers)
    where = os.fspath(directory)
    metadata = _read_metadata(where)
    if chosen and "optimizer.param_groups" not in metadata.state_dict_metadata:
        raise CheckpointError(
            f"load_sharded: expected a checkpoint of a model and its optimizers, got one of a model alone in {where}: "
            "call it without optimizers"
        )
    for optimizer in chosen:
        optimizer.zero_grad()  # an optimizer without state is given one, to load into, unless there are gradients
    with _without_torchs_warnings():
        weights, training = get_state_dict(model, chosen)
        state: dict[str, Any] = {"model": weights, "extra": ()}
        if chosen:
            state["optimizer"] = {"state": _with_saved_state(training["state"], metadata), "param_groups": ()}
        # Not flattened, or a tensor of which this rank has no part would seem to be missing.
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, metadata)
        _require_same(planner.state_dict, metadata, where)
        with _told_by_rank(f"load_sharded could not read {where}"):
            load(state, storage_reader=FileSystemReader(where), planner=planner)
        loaded = {**state["optimizer"], "param_groups": list(state["optimizer"]["param_groups"])} if chosen else {}
        set_state_dict(
            model,
            chosen,
            model_state_dict=state["model"],
            optim_state_dict=loaded,
            # Names have been compared; beyond that, a parameter that was never trained has no state.
            options=StateDictOptions(strict=False),
        )
    return dict(state["extra"])


def _checked(function: str, model: object, optimizers: object) -> tuple[torch.optim.Optimizer, ...]:
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
                "others: make it of model.parameters() after the model is wrapped"
            )
    return chosen


def _read_metadata(directory: str) -> Metadata:
    """What a sharded checkpoint says it holds, if its files are all there."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    wanted = f"load_sharded: expected a checkpoint of drivetrain_torch.save_sharded, got {directory}"
    try:
        metadata = FileSystemReader(directory).read_metadata()
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        made_otherwise = "extra" not in metadata.state_dict_metadata
    except FileNotFoundError:
        raise CheckpointError(
            f"{wanted} without {_METADATA}, which rank 0 writes: pass the directory of a committed checkpoint, to "
            "which every rank has reported its part"
        ) from None
    except Exception as error:  # a pickle of other bytes can raise anything
        raise CheckpointError(f"{wanted}, whose {_METADATA} cannot be read ({error!r}): use another one") from error
    if made_otherwise:
        raise CheckpointError(f"{wanted}, made by other code: load it with torch.distributed.checkpoint.load")
    if lost := sorted(name for name, end in ends.items() if _size(os.path.join(directory, name)) < end):
        raise CheckpointError(
            f"{wanted}, of whose files {_some(lost)} {'is' if len(lost) == 1 else 'are'} missing or cut short: "
            "have every rank report its part, and use a committed checkpoint"
        )
    return metadata


def _with_saved_state(state: Any, metadata: Metadata) -> dict[str, Any]:
    """The state of those parameters that had any when it was saved, if there was one at all."""
    paths = (metadata.planner_data or {}).values()
    saved = {path[2] for path in paths if path[:2] == ("optimizer", "state")}
    return {name: values for name, values in state.items() if name in saved or not saved}


def _require_same(wanted: Mapping[str, Any], metadata: Metadata, directory: str) -> None:
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    saved = metadata.state_dict_metadata
    compared = ("model.", "optimizer.") if "optimizer.param_groups" in wanted else ("model.",)
    lacks = [name for name in wanted if name not in saved]
    has = [name for name in saved if name.startswith(compared) and name not in wanted]
    differ = [
        f"{name} of shape {tuple(found.size)}, not {tuple(value.size())}"
        for name, value in wanted.items()
        if isinstance(value, torch.Tensor)
        and isinstance(found := saved.get(name), TensorStorageMetadata)
        and found.size != value.size()
    ]
    sides = [("without", lacks), ("with", has), ("with", differ)]
    if differences := [f"{side} {_some(names)}" for side, names in sides if names]:
        raise CheckpointError(
            f"load_sharded: expected a checkpoint of this {'model and optimizer' if len(compared) == 2 else 'model'}, "
            f"got {directory} {'; '.join(differences)}: make them as they were when it was saved"
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


def _some(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


@contextlib.contextmanager
def _told_by_rank(what: str) -> Iterator[None]:
    """Raises one rank's exception as a CheckpointError, where torch raises all of them with their tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"{what}: rank {rank} got {type(cause).__name__}: {cause}") from cause


@contextlib.contextmanager
def _without_torchs_warnings() -> Iterator[None]:
    """Hides what torch warns of because of its own modules, such as that FSDP1 is made of deprecated parts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=rf"torch\.|{__name__}")
        yield
