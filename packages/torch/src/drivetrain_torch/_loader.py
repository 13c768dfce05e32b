"""The data loader that ``prepare_data_loader`` returns.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from drivetrain import ConfigurationError, heartbeat

__all__ = ["PreparedLoader", "map_tensors", "shard"]

_ALL_ON_EVERY_WORKER = (
    "so every worker loads all of it. Shard it by drivetrain.get_context().get_world_rank(), then pass "
    "add_dist_sampler=False to turn this warning off"
)


def shard(loader: DataLoader[Any], *, rank: int, world_size: int) -> DataLoader[Any]:
    """Return a copy of a data loader that loads only one worker's shard of the data.

    A loader that already has a ``DistributedSampler`` is returned unchanged. A loader whose data cannot be sharded is
    also returned unchanged, with a warning.
    """
    if isinstance(loader.dataset, IterableDataset):
        name = type(loader.dataset).__name__
        _warn(f"{name} is an IterableDataset, which prepare_data_loader cannot shard, {_ALL_ON_EVERY_WORKER}")
        return loader
    batching, sampler = loader.batch_sampler, loader.sampler
    batch_size, drop_last = loader.batch_size, loader.drop_last
    if type(batching) is BatchSampler:  # passed by the user, or created by the loader from its batch_size
        sampler, batch_size, drop_last = batching.sampler, batching.batch_size, batching.drop_last
        batching = None
    elif batching is not None and loader.batch_size is None:
        sampler = getattr(batching, "sampler", batching)
    if isinstance(sampler, DistributedSampler):
        return loader
    if batching is not None or not _covers_dataset(sampler, loader):
        kept = f"the batch sampler {type(batching).__name__}" if batching is not None else type(sampler).__name__
        _warn(f"prepare_data_loader keeps {kept} and cannot shard the data it samples, {_ALL_ON_EVERY_WORKER}")
        return loader
    arguments = {
        "sampler": DistributedSampler(
            loader.dataset,
            num_replicas=world_size,
            rank=rank,
            shuffle=isinstance(sampler, RandomSampler),
            drop_last=drop_last,
        ),
        "batch_size": batch_size,
        "drop_last": drop_last,
        **{name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)},
    }
    try:
        return type(loader)(loader.dataset, **arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"prepare_data_loader: expected a loader class with the arguments of DataLoader, to recreate it with "
            f"another sampler, got {type(loader).__name__} ({error}). Create it with a DistributedSampler yourself"
        ) from error


_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
    "in_order",  # since torch 2.6
)


def _covers_dataset(sampler: Any, loader: DataLoader[Any]) -> bool:
    """Return True if a ``DistributedSampler`` can replace a sampler.

    It can replace a sampler that yields every sample exactly once, in order or shuffled.
    """
    is_simple = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    return is_simple and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


class PreparedLoader(DataLoader[Any]):
    """Wraps a data loader, and moves each batch to a device. Its attributes are those of the wrapped loader.

    Args:
        loader: the data loader to wrap.
        device: the device to move batches to, or None not to move them.
        auto_transfer: on a GPU, copy the next batch on a separate CUDA stream while the current batch is processed.
    """

    def __init__(self, loader: DataLoader[Any], *, device: torch.device | None, auto_transfer: bool) -> None:
        vars(self).update(vars(loader))
        self._loader = loader
        self._device = device
        self._overlaps = auto_transfer and device is not None and device.type == "cuda"

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet while the object is being unpickled or copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = iter(self._loader)
        if self._device is None:
            return self._counted(batches)
        return self._copied_ahead(batches) if self._overlaps else self._moved(batches, self._device)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch to each sampler that has a method ``set_epoch``. Skip other samplers."""
        for sampler in (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    @staticmethod
    def _counted(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            heartbeat()
            yield batch

    @staticmethod
    def _moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
        for batch in batches:
            heartbeat()
            yield map_tensors(lambda tensor: tensor.to(device), batch)

    def _copied_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        device = self._device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        end = object()

        def copy_next() -> Any:
            batch = next(batches, end)
            with torch.cuda.stream(stream):
                return map_tensors(lambda tensor: _to_non_blocking(tensor, device), batch)

        upcoming = copy_next()
        while upcoming is not end:
            batch, working = upcoming, torch.cuda.current_stream(device)
            working.wait_stream(stream)
            map_tensors(lambda tensor: _record_stream(tensor, working), batch)  # noqa: B023 - called at once
            upcoming = copy_next()
            heartbeat()
            yield batch


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to each tensor in a batch, and return the batch with the results.

    Tensors may be nested in mappings, lists and tuples. Other objects with a ``to`` method are treated like tensors.
    """
    if callable(getattr(batch, "to", None)):
        return function(batch)
    if isinstance(batch, MutableMapping):
        result = copy.copy(batch)  # the copy has the same class and other attributes
        result.update({key: map_tensors(function, value) for key, value in batch.items()})
        return result
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def _to_non_blocking(value: Any, device: torch.device | None) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)


def _record_stream(value: Any, stream: torch.cuda.Stream) -> Any:
    """Prevent the reuse of a tensor's memory until the work that is queued on a stream is done. Return the tensor."""
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
    return value
