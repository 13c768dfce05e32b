"""Checkpoints in which every rank writes and reads its own part, through ``torch.distributed.checkpoint``.

The tensors are in files ``__<rank>_0.distcp``, one for each rank, with the index of :mod:`drivetrain_torch._index`. All
other values are in ``state.pt``, which rank 0 writes. No two ranks write a file of the same name, so the directories of
all ranks can be merged into one.

This module imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from drivetrain import CheckpointError, ConfigurationError
from drivetrain.plugin.state import Differences
from drivetrain_torch._names import is_fully_sharded

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.fsdp import FSDPModule

    from drivetrain_torch._mesh import Mesh

__all__ = [
    "SHARDED",
    "owner_of",
    "read_parts",
    "reshard",
    "without_torch_warnings",
    "write_parts",
]

SHARDED = "sharded"
"""The key in ``state.pt`` of the values of sharded parts that are not tensors."""


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Make the parameters of ``fully_shard`` those that the optimizer has.

    After a forward pass without a backward pass, as in an evaluation, a module keeps its whole parameters.
    """
    for module in modules:
        for each in module.modules():
            if is_fully_sharded(each):
                cast("FSDPModule", each).reshard()


def write_parts(
    directory: str | os.PathLike[str],
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
    rest: Mapping[str, Any],
    *,
    verify: bool,
    mesh: Mesh | None = None,
) -> None:
    """Write this rank's part of modules and their optimizers. Called on every rank.

    Args:
        directory: the directory, which is created if it does not exist.
        modules: the modules by name.
        optimizers: the optimizers by name. Those of one name belong to the same module.
        rest: other values by name, which rank 0 writes to ``state.pt``.
        verify: see :func:`~drivetrain_torch._files.write_state`.
        mesh: the mesh of all ranks, if they may have different stages of a pipeline.

    Raises:
        CheckpointError: the directory already holds a checkpoint, or a rank could not write its part.
        ConfigurationError: two stages have parameters of the same name.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save

    from drivetrain_torch._files import write_state
    from drivetrain_torch._index import INDEX, IndexWriter

    if os.path.exists(os.path.join(directory, INDEX)):
        raise CheckpointError(
            f"TrainState: expected a directory without a checkpoint, got one in {os.fspath(directory)}. "
            "Use a new directory for each checkpoint"
        )
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with without_torch_warnings():
        tensors, values = _collect(modules, optimizers, is_first=is_first if mesh is None else mesh.is_first_of_stage)
        if mesh is not None and mesh.stages > 1:
            values = _merge_stages(mesh.gather((mesh.stage, [*tensors], values)), optimizers)
        if is_first:  # before the others return from save(), which may load from the same directory
            os.makedirs(directory, exist_ok=True)
            write_state(os.fspath(directory), {**rest, SHARDED: values}, verify=verify)
        with _raising_first_rank_error("TrainState could not write the checkpoint"):
            # The files need not be flushed to disk: report() copies them to durable storage.
            save(tensors, storage_writer=IndexWriter(directory, sync_files=False))


def _collect(
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
    *,
    is_first: bool,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors to write by their full name, and all other values by the name of the part."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    trained: set[str] = set()
    for name, chosen in optimizers.items():
        owner = owner_of(name, chosen, modules)
        training: Any = get_optimizer_state_dict(modules[owner], chosen)
        groups = list(training.get("param_groups", ()))
        states: dict[str, Any] = training["state"]
        trained |= {f"{owner}.{parameter}" for group in groups for parameter in group["params"]}
        for parameter, state in states.items():
            tensors.update({f"{name}.state.{parameter}.{key}": each for key, each in state.items() if _is_tensor(each)})
        rest = {
            key: {inner: each for inner, each in state.items() if not _is_tensor(each)} for key, state in states.items()
        }
        values[name] = {"state": rest, "param_groups": groups}
    for name, module in modules.items():
        weights = get_model_state_dict(module)
        values[name] = {key: each for key, each in weights.items() if not _is_tensor(each)}
        for key, tensor in weights.items():
            # Replicated parameters are written by one of the ranks, but buffers may differ: those of rank 0 are saved.
            if _is_tensor(tensor) and (is_first or f"{name}.{key}" in trained or _is_sharded(tensor)):
                tensors[f"{name}.{key}"] = tensor
    return tensors, values


def _merge_stages(
    ranks: Sequence[tuple[int, list[str], dict[str, Any]]], optimizers: Collection[str]
) -> dict[str, Any]:
    """Return the values of all stages that are not tensors.

    Args:
        ranks: for each rank, its stage, and the return value of :func:`_collect` with the names of the tensors only.
        optimizers: the names of the optimizers.
    """
    owners: dict[str, int] = {}
    values_of: dict[int, dict[str, Any]] = {}
    for stage, names, values in ranks:
        values_of.setdefault(stage, values)
        if shared := [name for name in names if owners.setdefault(name, stage) != stage]:
            raise ConfigurationError(
                f"[DT-729] TrainState: expected stages of a pipeline with different names of parameters, got "
                f"{shared[0]!r} in the stages {owners[shared[0]]} and {stage}. Keep the names of the whole model: "
                "remove the layers of the other stages from a copy of it"
            )
    merged: dict[str, Any] = {}
    for part in values_of[0]:
        of_stages = [values_of[stage][part] for stage in sorted(values_of)]
        merged[part] = _union(of_stages)
        if part in optimizers:
            groups = [group for values in of_stages for group in values["param_groups"]]
            merged[part] = {"state": _union(values["state"] for values in of_stages), "param_groups": groups}
    return merged


def _union(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def owner_of(name: str, optimizers: Sequence[torch.optim.Optimizer], modules: Mapping[str, torch.nn.Module]) -> str:
    """Return the name of the module that has all parameters of some optimizers.

    Raises:
        ConfigurationError: there is none.
    """
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for module_name, module in modules.items():
        if trained <= {id(parameter) for parameter in module.parameters()}:
            return module_name
    raise ConfigurationError(
        f"[DT-812] TrainState({name}=...): expected the optimizer of one sharded module, got one with other "
        "parameters. Create it from the parameters of the wrapped module, and pass both"
    )


def read_parts(
    directory: str,
    index: Metadata,
    values: Mapping[str, Any],
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
    *,
    problem: str,
    remedy: str,
    strict: bool = True,
    mesh: Mesh | None = None,
) -> Differences:
    """Load modules and optimizers that :func:`write_parts` has written, in place. Called on every rank.

    Args:
        directory: the directory of the checkpoint.
        index: the checked index.
        values: the values that are not tensors, by the name of the part.
        modules: the modules by name, sharded or not.
        optimizers: the optimizers by name.
        problem: the beginning of the error about other entries.
        remedy: its end.
        strict: False to load the entries that agree.
        mesh: the mesh of all ranks, if they may have different stages of a pipeline.

    Returns:
        The differences between the entries. With ``strict``, there are none.

    Raises:
        CheckpointError: the entries differ, or the checkpoint is damaged.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    # strict=True would reject parameters that were never trained, because they have no optimizer state. The names are
    # compared here.
    options = StateDictOptions(strict=False)
    with without_torch_warnings(), _damage_as_error(directory):
        weights, training = _templates(values, modules, optimizers)
        targets = _targets(weights, training)
        differences = _compare(targets, index, [*weights, *training], _names_of_stages(targets, mesh))
        if differences and strict:
            raise CheckpointError(f"{problem} {differences}. {remedy}")
        skipped = {*differences.missing, *(name.partition(" ")[0] for name in differences.reshaped)}
        _read_tensors(directory, index, {name: each for name, each in targets.items() if name not in skipped})
        for name, module in modules.items():
            set_model_state_dict(module, {**weights[name], **values[name]}, options=options)
        for name, chosen in optimizers.items():
            state = {key: {**each, **values[name]["state"].get(key, {})} for key, each in training[name].items()}
            loaded: Any = {"state": state, "param_groups": list(values[name]["param_groups"])}
            owner = modules[owner_of(name, chosen, modules)]
            set_optimizer_state_dict(owner, chosen, optim_state_dict=loaded, options=options)
    return differences


def _templates(
    values: Mapping[str, Any],
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the states of modules and of optimizers by part, whose tensors the checkpoint is loaded into."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    training: dict[str, dict[str, Any]] = {}
    for name, chosen in optimizers.items():
        for optimizer in chosen:
            # torch creates the state that the checkpoint is loaded into, but only if there are no gradients.
            optimizer.zero_grad()
        state: Any = get_optimizer_state_dict(modules[owner_of(name, chosen, modules)], chosen)["state"]
        saved = values[name]["state"]
        # A parameter that was never trained has no state. If no parameter has one, another optimizer was saved.
        training[name] = {key: each for key, each in state.items() if key in saved or not saved}
    return {name: dict(get_model_state_dict(module)) for name, module in modules.items()}, training


def _targets(weights: Mapping[str, Mapping[str, Any]], training: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tensors to load by their full name."""
    targets = {f"{part}.{name}": each for part, state in weights.items() for name, each in state.items()}
    for part, states in training.items():
        for parameter, state in states.items():
            targets.update({f"{part}.state.{parameter}.{key}": each for key, each in state.items()})
    return {name: each for name, each in targets.items() if _is_tensor(each)}


def _names_of_stages(targets: Mapping[str, torch.Tensor], mesh: Mesh | None) -> set[str]:
    """Return the names of the tensors of all stages."""
    if mesh is None or mesh.stages == 1:
        return {*targets}
    return {name for names in mesh.gather([*targets]) for name in names}


def _compare(
    targets: Mapping[str, torch.Tensor], index: Metadata, parts: Sequence[str], known: set[str]
) -> Differences:
    """Return how the tensors of a checkpoint differ from those of the parts."""
    saved: Mapping[str, Any] = index.state_dict_metadata
    prefixes = tuple(f"{part}." for part in parts)
    return Differences(
        missing=[name for name in targets if name not in saved],
        unexpected=[name for name in saved if name.startswith(prefixes) and name not in known],
        reshaped=[
            f"{name} of shape {tuple(entry.size)}, not {tuple(targets[name].size())}"
            for name, entry in saved.items()
            if name in targets and entry.size != targets[name].size()
        ],
    )


def _read_tensors(directory: str, index: Metadata, targets: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from drivetrain_torch._index import IndexReader

    # If the planner flattened sharded tensors, it would report a tensor as missing of which this rank has no part.
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    with _raising_first_rank_error(f"TrainState could not read {directory}"):
        load(targets, storage_reader=IndexReader(directory, index), planner=planner)


@contextlib.contextmanager
def _damage_as_error(directory: str) -> Iterator[None]:
    """Convert the errors that damaged values cause in torch into a CheckpointError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"[DT-726] {directory}: expected the state of a model and its optimizers, got damaged values ({error!r}). "
            "Use another checkpoint"
        ) from error


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_sharded(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor


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
def without_torch_warnings() -> Iterator[None]:
    """Hide warnings that torch's own code causes, for example by its use of deprecated functions in FSDP1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=rf"torch\.|{__name__}")
        yield
