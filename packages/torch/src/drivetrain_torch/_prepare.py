"""Functions that prepare a model, a data loader and the random number generators for training on several workers."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import ConfigurationError, get_context
from drivetrain_torch._devices import get_device

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from drivetrain_torch._loader import PreparedLoader

__all__ = ["enable_reproducibility", "prepare_data_loader", "prepare_model"]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to this worker's device, and wrap it so that all workers train it together.

    Args:
        model: the model, the same on every worker.
        move_to_device: True to move the model to this worker's device, a ``torch.device`` to move it to that device, or
            False not to move it.
        parallel_strategy: ``"ddp"`` for ``DistributedDataParallel``, ``"fsdp"`` for ``FullyShardedDataParallel``, or
            None for no wrapper. With a single worker, the model is never wrapped.
        parallel_strategy_kwargs: additional arguments for the wrapper.

    Returns:
        The model, or the wrapper around it.

    Raises:
        ConfigurationError: the strategy is unknown.
        SessionError: called outside a train function.
    """
    import torch

    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ConfigurationError(
            f"prepare_model(parallel_strategy=...): expected 'ddp', 'fsdp' or None, got {parallel_strategy!r}"
        )
    device = get_device() if isinstance(move_to_device, bool) else torch.device(move_to_device)
    if move_to_device is not False:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        model = model.to(device)
    if parallel_strategy is None or get_context().get_world_size() == 1:
        return model
    options = dict(parallel_strategy_kwargs or {})
    if parallel_strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, **{"device_id": device, **options})
    if device.type == "cuda" and {parameter.device for parameter in model.parameters()} == {device}:
        options = {"device_ids": [device], "output_device": device, **options}
    return torch.nn.parallel.DistributedDataParallel(model, **options)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> PreparedLoader:
    """Shard a data loader, so that each worker loads its own part of the data, and move the batches to a device.

    The loader's sampler is replaced by a ``DistributedSampler``, which shuffles if the loader shuffles. All other
    arguments of the loader are kept; ``batch_size`` is the batch size per worker. With ``drop_last=True``, samples that
    do not divide evenly among the workers are dropped as well.

    A loader that already has a ``DistributedSampler`` keeps it. A loader with another custom sampler, a custom batch
    sampler or an iterable dataset is not sharded: every worker loads all of the data, and a warning says so.

    Args:
        data_loader: the loader, the same on every worker.
        add_dist_sampler: False not to shard the loader: every worker should load all of the data, or your own code
            shards it.
        move_to_device: move the tensors in each batch to this worker's device, including tensors nested in dicts,
            lists and tuples.
        auto_transfer: on a GPU, copy the next batch while the current batch is processed. The two overlap only if the
            loader has ``pin_memory=True``.

    Returns:
        A ``DataLoader`` with the attributes of the given loader, and a method ``set_epoch(epoch)``. Call this method
        before each epoch to get a new order.

    Raises:
        ConfigurationError: the argument is not a ``DataLoader``, or the loader cannot be recreated with another
            sampler because its class does not take the arguments of ``DataLoader``.
        SessionError: called outside a train function.
    """
    from torch.utils.data import DataLoader

    from drivetrain_torch._loader import PreparedLoader, shard

    context = get_context()
    loader: object = data_loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"prepare_data_loader: expected a torch.utils.data.DataLoader, got {loader!r}")
    if add_dist_sampler and context.get_world_size() > 1:
        loader = shard(loader, rank=context.get_world_rank(), world_size=context.get_world_size())
    return PreparedLoader(loader, device=get_device() if move_to_device else None, auto_transfer=auto_transfer)


def enable_reproducibility(seed: int = 0) -> None:
    """Limit the differences between two runs of the same train function. Call this at the start of the train function.

    This function seeds the random number generators of Python, NumPy (if it is installed) and torch. The seed is the
    same on every worker, and data loader workers derive their seeds from it. This function also makes torch use
    deterministic algorithms, which may be slower; operations without a deterministic algorithm raise an error.
    PyTorch's notes on reproducibility describe the remaining sources of differences. The settings stay in effect until
    the process exits. With ``ScalingConfig(num_workers=0)``, this is the process that calls ``fit()``.

    Args:
        seed: the seed of all generators.
    """
    import torch

    random.seed(seed)
    with contextlib.suppress(ModuleNotFoundError):
        # Seed NumPy even if it has not been imported yet. Other code may have imported it by now in some starts of the
        # workers and not in others, so a check for the import would make runs differ.
        importlib.import_module("numpy.random").seed(seed)
    torch.manual_seed(seed)  # also seeds the GPUs; data loader workers derive their seeds from it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic cuBLAS
