"""Functions that prepare a model, a data loader and the random number generators for training on several workers."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from drivetrain import ConfigurationError, PluginNotFoundError, get_context
from drivetrain.plugin import load_plugin
from drivetrain_torch._devices import get_device
from drivetrain_torch._mesh import Mesh
from drivetrain_torch._names import is_dtensor
from drivetrain_torch._strategies import ParallelStrategy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

    from drivetrain_torch._loader import PreparedLoader

__all__ = ["enable_reproducibility", "prepare", "prepare_data_loader", "prepare_model"]

_wrapped_models: WeakSet[torch.nn.Module] = WeakSet()
"""The models that strategies have wrapped, also those of third parties, whose classes are unknown."""


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | ParallelStrategy | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    exact: bool | None = None,
) -> torch.nn.Module:
    """Move a model to this worker's device, and wrap it so that all workers train it together.

    ``"fsdp"``, ``"fsdp2"`` and other strategies that shard a model replace its parameters. Create optimizers from the
    model that this function returns: the first step of an optimizer of replaced parameters raises an error.

    Args:
        model: the model, the same on every worker.
        move_to_device: True to move the model to this worker's device, a ``torch.device`` to move it to that device, or
            False not to move it.
        parallel_strategy: ``"ddp"`` for ``DistributedDataParallel``, ``"fsdp"`` for ``FullyShardedDataParallel``,
            ``"fsdp2"`` for ``fully_shard``, the name of another installed strategy, a :class:`ParallelStrategy`, or
            None for no wrapper. With a single worker, the model is never wrapped, but ``model.module`` is the model
            itself and ``model.no_sync()`` does nothing. A model without parameters is not wrapped either, nor, with
            ``"ddp"``, a model without trainable parameters.
        parallel_strategy_kwargs: additional arguments of a strategy that is given by name. ``"ddp"``, ``"fsdp"`` and
            ``"fsdp2"`` pass them to the wrapper; ``"fsdp2"`` also accepts ``modules``, the classes of submodules that
            are sharded as units.
        mesh: the device mesh of all workers, if data parallelism is combined with another kind. The names of its
            dimensions determine their meaning; there is at most one dimension of each kind:

            - data: ``"dp"`` or ``"data"``; with ``"fsdp"`` or ``"fsdp2"``, and without a shard dimension, parameters
              are sharded along it;
            - replicate: ``"dp_replicate"`` or ``"replicate"``;
            - shard: ``"dp_shard"``, ``"shard"`` or ``"fsdp"``;
            - tensor: ``"tp"`` or ``"tensor"``; parallelize the layers with ``parallelize_module`` first, and use
              ``"fsdp2"``;
            - context: ``"cp"`` or ``"context"``: gradients are averaged along it, too;
            - pipeline: ``"pp"`` or ``"pipeline"``; the model is the stage of this rank.

            Ranks that differ only in the last three dimensions continue with the same random states. None if all
            workers share the data.
        exact: True if a resumed run must compute exactly the same values as an undisturbed run, also with three or more
            workers. ``"ddp"`` then sets ``find_unused_parameters=True``, which costs time in every step; the other
            strategies of this package need no change. None means True if torch uses deterministic algorithms, which
            :func:`enable_reproducibility` turns on.

    Returns:
        The model, or the wrapper around it.

    Raises:
        ConfigurationError: the strategy is unknown or does not accept the arguments, or the model is already wrapped;
            or the mesh does not contain all workers, has unknown dimensions, or is not supported by the strategy; or
            parameters are ``DTensor`` objects, but no mesh is given. If another library wraps the result again, this
            raises the same error.
        PluginError: the strategy cannot be loaded.
        SessionError: called outside a train function.
    """
    import torch

    strategy = _make_strategy(parallel_strategy, parallel_strategy_kwargs or {})
    checked = None if mesh is None else Mesh.of(mesh, "prepare_model")
    if checked is not None:
        checked.align_random_states()
    device = get_device() if isinstance(move_to_device, bool) else torch.device(move_to_device)
    given = list(model.parameters())
    if move_to_device is not False:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        model = model.to(device)
    if strategy is not None and get_context().get_world_size() == 1:
        _add_names_of_wrapper(model)
    elif strategy is not None and given:
        from drivetrain_torch._twice import refuse_second_wrapper

        refuse_second_wrapper(model)
        strategy = strategy if mesh is None else strategy.on_mesh(mesh)
        exact = torch.are_deterministic_algorithms_enabled() if exact is None else exact
        model = (strategy.wrap_exact if exact else strategy.wrap)(model, device)
        _wrapped_models.add(model)
    if checked is not None:
        checked.remember_for(model)
    _refuse_optimizers_of_replaced_parameters(given, model, strategy)
    return model


def _add_names_of_wrapper(model: torch.nn.Module) -> None:
    """Make ``model.module`` and ``model.no_sync()`` work without a wrapper, for train functions that use them."""
    if not hasattr(model, "module"):
        vars(model)["module"] = model  # not by setattr(), which would make the model a submodule of itself
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = contextlib.nullcontext


def _refuse_optimizers_of_replaced_parameters(
    given: list[torch.nn.Parameter], model: torch.nn.Module, strategy: ParallelStrategy | None
) -> None:
    kept = {id(parameter) for parameter in model.parameters()}
    if replaced := [parameter for parameter in given if id(parameter) not in kept]:
        from drivetrain_torch._replaced import refuse_optimizers_of

        refuse_optimizers_of(replaced, "None" if strategy is None else type(strategy).__name__)


def _make_strategy(given: str | ParallelStrategy | None, options: Mapping[str, Any]) -> ParallelStrategy | None:
    if given is None or isinstance(given, ParallelStrategy):
        return given
    problem = (
        "[DT-724] prepare_model(parallel_strategy=...): expected the name of a strategy, a ParallelStrategy or None, "
        "got"
    )
    if not isinstance(given, str):
        raise ConfigurationError(f"{problem} {given!r}")
    try:
        kind = load_plugin("strategy", given)
    except PluginNotFoundError as error:
        raise ConfigurationError(f"{problem} {given!r}: {error}") from error
    try:
        strategy: object = kind(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"[DT-724] prepare_model(parallel_strategy_kwargs=...): expected arguments of the strategy {given!r}, got "
            f"{', '.join(options)}: {error}"
        ) from error
    if not isinstance(strategy, ParallelStrategy):
        raise ConfigurationError(f"{problem} {given!r}, which creates a {type(strategy).__name__}")
    return strategy


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    mesh: DeviceMesh | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    replay: bool = True,
) -> PreparedLoader:
    """Shard a data loader, so that each worker loads its own part of the data, and move the batches to a device.

    The loader's sampler is replaced by a ``DistributedSampler``, which shuffles if the loader shuffles. The result is a
    copy of the loader with all of its other attributes, and an object of its class; ``batch_size`` is the batch size
    per worker. The given loader is not changed.

    A loader that already has a ``DistributedSampler`` keeps it. A loader with another custom sampler, a custom batch
    sampler or an iterable dataset is not sharded: every worker loads all of the data, and a warning says so.

    If the samples do not divide evenly among the workers, some workers load one sample that another worker loads too.
    ``repeated_rows`` of the result is the number of such rows at the end of the current batch, for metrics that must
    count every sample once. With ``drop_last=True``, the samples that do not divide evenly are dropped instead.

    The order of a shuffled loader depends on the seed of its ``generator``, or on the seed that the train function has
    passed to ``torch.manual_seed`` or :func:`enable_reproducibility`. If the seeds of the ranks differ, that of rank 0
    is used. Without a seed, the order is the same in every run and after a retry. With ``TorchTrainer``, all workers
    must prepare their shuffled loaders in the same order.

    Args:
        data_loader: the loader, the same on every worker.
        add_dist_sampler: False not to shard the loader: every worker should load all of the data, or your own code
            shards it.
        move_to_device: move the tensors in each batch to this worker's device, including tensors nested in dicts,
            lists and tuples.
        auto_transfer: on a GPU, copy the next batch while the current batch is processed. The two overlap only if the
            loader has ``pin_memory=True``. A loader with a method ``state_dict`` is not read ahead, so that its state
            is the position of the train function.
        mesh: the device mesh of all workers, whose dimensions :func:`prepare_model` describes. Workers at the same
            position of the data, replicate and shard dimensions load the same data in the same order, and continue with
            the same random states. By default, each worker loads other data.
        num_replicas: instead of a mesh, the number of shards.
        rank: with ``num_replicas``, the shard that this worker loads.
        replay: when an epoch is resumed with loader processes, load the batches again that were read, and discard them.
            This makes the remaining batches the same even if the dataset draws random numbers. False to skip these
            batches without loading them: rows and order are the same, but not the numbers that loader processes draw.

    Returns:
        A copy of the loader with the attribute ``repeated_rows`` and a method ``set_epoch(epoch)``. Call this method
        before each epoch to get a new order. It passes the epoch to the samplers and to the dataset, and to the
        datasets that it contains, if they have a method ``set_epoch``.

    Raises:
        ConfigurationError: the argument is not a ``DataLoader``, Accelerate has already sharded it, the shard is not
            described as above, the loader has a ``DistributedSampler`` for another shard than the mesh, or processes of
            the loader are already running.
        SessionError: called outside a train function.
    """
    from torch.utils.data import DataLoader

    from drivetrain_torch._loader import wrap
    from drivetrain_torch._sampling import accept_epochs, require_part, shard
    from drivetrain_torch._twice import refuse_second_shard

    loader: object = data_loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"[DT-724] prepare_data_loader: expected a torch.utils.data.DataLoader, got {loader!r}"
        )
    refuse_second_shard(loader)
    checked = None if mesh is None else Mesh.of(mesh, "prepare_data_loader")
    own, count = _position(checked, num_replicas, rank)
    if add_dist_sampler and get_context().get_world_size() > 1:
        loader = shard(loader, rank=own, world_size=count)
    elif add_dist_sampler:
        accept_epochs(loader)
    device = get_device() if move_to_device else None
    if device is not None and device.type == "cpu":
        device = None  # a loader's tensors are there, and looking for them takes several percent of its time
    prepared = wrap(loader, device=device, auto_transfer=auto_transfer, world_size=count, replay=replay)
    if checked is not None:
        require_part(prepared, checked.data_position, "prepare_data_loader")
        checked.align_random_states()
        checked.remember_for(prepared)
    return prepared


def _position(mesh: Mesh | None, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return which shard this worker loads, and the number of shards."""
    if mesh is not None:
        if num_replicas is not None or rank is not None:
            raise ConfigurationError(
                "[DT-724] prepare_data_loader: expected either a mesh or num_replicas and rank, got a mesh, "
                f"num_replicas={num_replicas} and rank={rank}. Remove one of them"
            )
        return mesh.data_position
    context = get_context()
    if num_replicas is None and rank is None:
        return context.get_world_rank(), context.get_world_size()
    if num_replicas is None or rank is None or not 0 <= rank < num_replicas:
        raise ConfigurationError(
            "[DT-724] prepare_data_loader: expected num_replicas and a rank from 0 to num_replicas - 1, got "
            f"num_replicas={num_replicas} and rank={rank}"
        )
    return rank, num_replicas


def prepare(value: Any) -> Any:
    """Prepare a model, a data loader or an optimizer for :func:`drivetrain.prepare`."""
    torch: Any = sys.modules.get("torch")
    if torch is None:  # so the object is not one of torch
        return NotImplemented
    schedulers = torch.optim.lr_scheduler.LRScheduler
    if not isinstance(value, (torch.nn.Module, torch.utils.data.DataLoader, torch.optim.Optimizer, schedulers)):
        return NotImplemented
    from drivetrain_torch._loader import PreparedLoader

    if get_context().get_world_size() > 1 and not torch.distributed.is_initialized():
        raise ConfigurationError(
            f"[DT-725] prepare(): expected a process group of all workers for a {type(value).__name__}, got none. Use "
            "a TorchTrainer, or prepare the object with functions of the framework that connects the workers"
        )
    if isinstance(value, torch.nn.Module):
        return value if _is_parallel(value) else prepare_model(value)
    if isinstance(value, torch.utils.data.DataLoader):
        return value if isinstance(value, PreparedLoader) else prepare_data_loader(value)
    if isinstance(value, torch.optim.Optimizer) and _has_state_elsewhere(value):
        value.load_state_dict(value.state_dict())  # moves the state to the devices of the parameters
    return value


def _is_parallel(model: torch.nn.Module) -> bool:
    """Return True if a model has been wrapped, or its parameters are sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if model in _wrapped_models:
        return True
    wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    return any(isinstance(each, wrappers) for each in model.modules()) or any(
        is_dtensor(each) for each in model.parameters()
    )


def _has_state_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has state on another device than the parameter, because the model was moved."""
    import torch

    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
        for parameter, state in optimizer.state.items()
        for value in state.values()
    )


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
