"""Detects a model that is wrapped twice, and data that is sharded twice, by drivetrain and by another library.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain import ConfigurationError
from drivetrain.plugin.backends import is_instance_of

__all__ = ["ShardSampler", "refuse_second_shard", "refuse_second_wrapper"]

_REMEDY = (
    "Prepare models and data loaders once: either with prepare_model and prepare_data_loader, or with the library that "
    "trains, such as Accelerator.prepare"
)


def refuse_second_wrapper(model: torch.nn.Module) -> None:
    """Raise an error if a model is or contains a wrapper, and make wrapping a wrapper an error from now on.

    ``Accelerator.prepare``, ``Fabric.setup`` and others wrap models, too. They register the model as a submodule of the
    wrapper, which is when PyTorch calls :func:`_check`.
    """
    if _is_fsdp(model) or any(map(_is_ddp, model.modules())):
        raise _error("prepare_model", model)
    _register_check()


@functools.cache
def _register_check() -> None:
    register_module_module_registration_hook(_check)


def _check(outer: torch.nn.Module, name: str, inner: Any) -> None:
    if isinstance(inner, torch.nn.Module) and _is_wrapper(outer):
        # Within FullyShardedDataParallel, submodules may be wrapped in the same class.
        is_refused = _is_wrapper if _is_ddp(outer) else _is_ddp
        if any(map(is_refused, inner.modules())):
            raise _error(type(outer).__name__, inner)


def _is_ddp(model: torch.nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def _is_fsdp(model: torch.nn.Module) -> bool:
    # Importing torch.distributed.fsdp takes seconds, so this does not import it.
    return is_instance_of(model, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is_wrapper(model: torch.nn.Module) -> bool:
    return _is_ddp(model) or _is_fsdp(model)


def _error(where: str, model: torch.nn.Module) -> ConfigurationError:
    wrapper = next(type(each).__name__ for each in model.modules() if _is_wrapper(each))
    return ConfigurationError(
        f"[DT-763] {where}: expected a model that is not wrapped yet, got a model with a {wrapper}. {_REMEDY}"
    )


def refuse_second_shard(loader: DataLoader[Any]) -> None:
    """Raise an error if Accelerate has already sharded a data loader."""
    if type(loader).__module__.partition(".")[0] == "accelerate":
        raise ConfigurationError(
            f"[DT-763] prepare_data_loader: expected a data loader that loads all of the data, got a "
            f"{type(loader).__name__} of Accelerate. {_REMEDY}"
        )


class ShardSampler(DistributedSampler[Any]):
    """The sampler of a loader that ``prepare_data_loader`` has sharded. Sharding its rows again is an error."""

    def __iter__(self) -> Iterator[Any]:
        # Accelerate does not ask the sampler that it wraps. Only the calling frames show which rows it leaves out.
        frame = inspect.currentframe()
        while frame is not None and (frame := frame.f_back) is not None:
            if frame.f_globals.get("__name__") == "accelerate.data_loader":
                caller = type(frame.f_locals.get("self"))
                if any(kind.__name__ in ("BatchSamplerShard", "DataLoaderDispatcher") for kind in caller.__mro__):
                    raise ConfigurationError(
                        "[DT-763] Accelerator.prepare: expected a data loader that loads all of the data, got one from "
                        f"prepare_data_loader, which loads the part of this worker. {_REMEDY}"
                    )
        return super().__iter__()
