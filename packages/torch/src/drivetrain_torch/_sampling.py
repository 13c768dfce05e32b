"""How ``prepare_data_loader`` splits the rows among the ranks, and orders them.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from drivetrain import ConfigurationError
from drivetrain.plugin.datasets import DataPosition
from drivetrain_torch._backend import joined_group
from drivetrain_torch._blocks import is_split_in_batches, repeated_rows_of_batches
from drivetrain_torch._twice import ShardSampler

__all__ = ["accept_epochs", "index_sampler", "pass_epoch", "repeated_rows", "require_part", "shard"]

_ALL_ON_EVERY_WORKER = (
    "so every worker loads all of it. Shard it by drivetrain.get_context().get_world_rank() or by the position in your "
    "mesh, then pass add_dist_sampler=False to turn this warning off"
)


def shard(loader: DataLoader[Any], *, rank: int, world_size: int) -> DataLoader[Any]:
    """Return a copy of a data loader that loads only one worker's shard of the data.

    Only the samplers of the copy are different; it has all other attributes of the loader. A loader that already has a
    ``DistributedSampler`` is returned unchanged. A loader whose data cannot be sharded is also returned unchanged, with
    a warning.
    """
    if isinstance(loader.dataset, IterableDataset):
        name = type(loader.dataset).__name__
        _warn(f"{name} is an IterableDataset, which prepare_data_loader cannot shard, {_ALL_ON_EVERY_WORKER}")
        return loader
    given = index_sampler(loader)
    if isinstance(_innermost(given), DistributedSampler):
        return loader
    sampler = _sharded(given, loader, rank=rank, world_size=world_size)
    if sampler is None:
        own_batches = loader.batch_sampler is not None and not _is_of_torch(given, "BatchSampler")
        kept = f"the batch sampler {type(given).__name__}" if own_batches else type(_innermost(given)).__name__
        _warn(f"prepare_data_loader keeps {kept} and cannot shard the data it samples, {_ALL_ON_EVERY_WORKER}")
        return loader
    if loader.persistent_workers and any(isinstance(value, Iterator) for value in vars(loader).values()):
        raise ConfigurationError(
            "[DT-723] prepare_data_loader: expected a loader that has not been iterated, got one with running loader "
            "processes (persistent_workers=True), which would continue to load all of the data. Prepare the loader "
            "before its first iteration"
        )
    replaced = copy.copy(loader)
    # DataLoader forbids to set these attributes. Creating another loader instead would require to know all arguments of
    # the loader's class.
    vars(replaced)["sampler"] = _innermost(sampler)
    vars(replaced)["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    return replaced


def require_part(loader: DataLoader[Any], position: DataPosition, where: str) -> None:
    """Raise an error if a loader has a ``DistributedSampler`` of another part of the data than a position in a mesh.

    Ranks that must load the same rows would load different ones, and train on them without an error.
    """
    sampler = _innermost(index_sampler(loader))
    if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != position:
        raise ConfigurationError(
            f"[DT-727] {where}: expected a loader of part {position.part} of {position.parts}, the position of this "
            f"rank in the mesh, got one of part {sampler.rank} of {sampler.num_replicas}. Pass the mesh to "
            "prepare_data_loader, and create a DistributedSampler of your own with the same part"
        )


def accept_epochs(loader: DataLoader[Any]) -> None:
    """Make ``loader.sampler.set_epoch(epoch)`` work for samplers of torch, which draw another order for each epoch."""
    for sampler in (loader.sampler, _innermost(loader.batch_sampler)):
        if isinstance(sampler, Sampler) and not _takes_epochs(sampler):
            vars(sampler)["set_epoch"] = _ignore_epoch


def _ignore_epoch(epoch: int) -> None:
    """Do nothing: the order does not depend on the number of the epoch."""


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose items the loader fetches: indices, or lists of indices."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _innermost(sampler: Any) -> Any:
    return getattr(sampler, "sampler", sampler)


def _sharded(sampler: Any, loader: DataLoader[Any], *, rank: int, world_size: int, drop_last: bool = False) -> Any:
    """Return a sampler of one worker's part of the indices, or None if the sampler cannot be replaced."""
    if _is_of_torch(sampler, "BatchSampler"):
        options = {"rank": rank, "world_size": world_size, "drop_last": sampler.drop_last}
        inner = _sharded(sampler.sampler, loader, **options)
        if inner is None:
            return None
        batches = copy.copy(sampler)
        batches.sampler = inner
        return batches
    is_random = _is_of_torch(sampler, "RandomSampler")
    if not (type(sampler) is SequentialSampler or (is_random and not sampler.replacement)):
        return None
    dataset: Any = loader.dataset
    if len(sampler) != len(dataset):
        return None
    return ShardSampler(
        dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=is_random,
        seed=_seed(loader, sampler) if is_random else 0,
        drop_last=drop_last,
    )


def _is_of_torch(value: Any, name: str) -> bool:
    """Return True for a class of torch, and for the class of the same name in torchdata, which saves its position."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] in ("torch", "torchdata")


def _seed(loader: DataLoader[Any], sampler: Any) -> int:
    """Return the seed of the order, the same on all ranks: that of the loader's generator, or the user's global seed.

    Without either, the seed is 0, so that a resumed run continues in the same order.
    """
    generator = loader.generator
    if generator is None and type(sampler) is RandomSampler:
        generator = sampler.generator
    group = joined_group.value
    if generator is not None:
        seed = generator.initial_seed()
    elif group is not None and torch.initial_seed() != group.initial_seed:
        seed = torch.initial_seed()
    else:
        seed = 0
    # The sampler adds the epoch to the seed, and the sum must be an integer of 64 bits.
    return (seed if group is None else group.from_rank_0(seed)) % 2**63


def repeated_rows(loader: DataLoader[Any]) -> int:
    """Return the number of rows at the end of a rank's shard that were repeated to make all shards equally long."""
    if is_split_in_batches(index_sampler(loader)):
        return repeated_rows_of_batches(index_sampler(loader))
    sampler = _innermost(index_sampler(loader))
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    own = range(sampler.rank, len(sampler.dataset), sampler.num_replicas)  # type: ignore[arg-type]
    return len(sampler) - len(own)


def pass_epoch(loader: DataLoader[Any], epoch: int, *, processes_are_running: bool) -> None:
    """Call ``set_epoch`` of everything in a loader that has this method."""
    _set_epoch([loader.sampler, loader.batch_sampler], epoch)
    collate = loader.collate_fn
    received = _set_epoch([loader.dataset, collate, getattr(collate, "__self__", None)], epoch)
    # The datasets of Hugging Face share the epoch with processes.
    unshared = [each for each in received if type(each).__module__.partition(".")[0] != "datasets"]
    if processes_are_running and unshared:
        _warn(
            f"set_epoch({epoch}) does not reach {type(unshared[0]).__name__} in the loader processes, which already "
            "run. Create the loader with persistent_workers=False, or keep the epoch in a tensor in shared memory"
        )


def _set_epoch(roots: list[Any], epoch: int) -> list[Any]:
    waiting, visited, received = list(roots), set(), []
    while waiting:
        each = waiting.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        if _takes_epochs(each):
            each.set_epoch(epoch)
            received.append(each)
        for value in getattr(each, "__dict__", {}).values():
            waiting += [part for part in _parts(value) if _is_followed(part)]
    return received


def _parts(value: Any) -> list[Any]:
    """Return a value, or the items of a collection of datasets or samplers. Large collections of data are skipped."""
    if not isinstance(value, (Mapping, list, tuple)) or _is_followed(value):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    return list(items) if any(map(_is_followed, itertools.islice(items, 1))) else []


def _is_followed(value: Any) -> bool:
    return isinstance(value, (Dataset, Sampler, DataLoader)) or _takes_epochs(value)


def _takes_epochs(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "set_epoch", None))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
