"""What a train function calls to make a model, its data and its randomness fit for several workers."""

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
    """Moves a model to this worker's device, and wraps it so that all workers train it together.

    Args:
        model: the model, the same on every worker.
        move_to_device: True for this worker's device, a device for that one, False to leave the model where it is.
        parallel_strategy: ``"ddp"`` for ``DistributedDataParallel``, ``"fsdp"`` for ``FullyShardedDataParallel``,
            None for no wrapper. A worker that is alone needs none and gets none.
        parallel_strategy_kwargs: further arguments for the wrapper.

    Returns:
        The model, or the wrapper around it.

    Raises:
        ConfigurationError: the strategy is not known.
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
    """Has each worker load its own part of the data, and moves the batches to its device.

    Every argument of the loader is kept; ``batch_size`` is that of one worker. A loader that shuffles gets a
    ``DistributedSampler`` that shuffles, one that drops the last batch drops what does not divide evenly over the
    workers as well. Samplers and batch samplers of your own stay as they are, and so do iterable datasets: a warning
    says that each worker then loads all data, unless it is a ``DistributedSampler``.

    Args:
        data_loader: the loader, the same on every worker.
        add_dist_sampler: False loads all data on every worker, or what your own code makes of it.
        move_to_device: move tensors in batches, however nested in dicts, lists and tuples, to this worker's device.
        auto_transfer: on a GPU, copy the next batch while this one is worked on; pinned memory makes it worthwhile.

    Returns:
        A ``DataLoader`` with the attributes of the given one, and ``set_epoch(epoch)``: call it before each epoch
        for a new order.

    Raises:
        ConfigurationError: the loader is of a class that cannot be made again with another sampler.
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
    """Limits what makes two runs of the same train function differ; call it first.

    Seeds Python's, NumPy's (if it is imported) and torch's random numbers, the same on every worker and through them
    those of data loader workers, and has torch use deterministic algorithms, which may be slower and refuses
    operations that have none. What remains is described in torch's notes on reproducibility. It holds for the rest of
    the process: with ``num_workers=0`` that is your own.

    Args:
        seed: the seed.
    """
    import torch

    random.seed(seed)
    with contextlib.suppress(ModuleNotFoundError):
        # Imported if it is there, for whether something else has done so differs between a first and a later start.
        importlib.import_module("numpy.random").seed(seed)
    torch.manual_seed(seed)  # the GPUs' as well; data loader workers take theirs from it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
