"""The names of parameters and buffers without the names that wrappers add, such as ``module.``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.plugin.backends import is_instance_of

if TYPE_CHECKING:
    import torch

__all__ = ["find_optimizer_names", "is_dtensor", "is_fully_sharded", "is_sharded", "plain_names"]

_OF_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The attributes in which ``torch.compile``, FSDP and activation checkpointing keep the module that they wrap."""


def plain_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names that the entries of a module have without wrappers, by the names that they have in it."""
    return {name: _plain_name(module, name) for name in names}


def _plain_name(module: torch.nn.Module, name: str) -> str:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    kept: list[str] = []
    current: Any = module
    *path, last = name.split(".")
    for part in path:
        is_wrapped = part == "module" and isinstance(current, (DataParallel, DistributedDataParallel))
        if not is_wrapped and part not in _OF_WRAPPERS:
            kept.append(part)
        current = getattr(current, part, None)
    return ".".join([*kept, last])


def find_optimizer_names(
    optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]
) -> list[tuple[str, str] | None]:
    """Return the module and the plain name of each parameter of an optimizer, in the order of its ``state_dict()``.

    A parameter that is in no module has None.
    """
    known: dict[int, tuple[str, str]] = {}
    for module_name, module in modules.items():
        parameters = dict(module.named_parameters())
        for name, plain in plain_names(module, parameters).items():
            known.setdefault(id(parameters[name]), (module_name, plain))
    return [known.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]


def is_sharded(module: torch.nn.Module) -> bool:
    """Return True if the ranks have different parts of a module's parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    # After a forward pass without a backward pass, the parameters of fully_shard are whole for a while.
    return any(map(is_dtensor, [*module.parameters(), *module.buffers()])) or any(
        isinstance(each, FullyShardedDataParallel) or is_fully_sharded(each) for each in module.modules()
    )


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Return True for a module to which ``fully_shard`` was applied."""
    return is_instance_of(module, "torch.distributed.fsdp", "FSDPModule")


def is_dtensor(value: object) -> bool:
    """Return True for a ``DTensor``, the class of which has no public name before torch 2.5."""
    return type(value).__name__ == "DTensor"
