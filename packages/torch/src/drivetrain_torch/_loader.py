"""The data loader that ``prepare_data_loader`` returns.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import heartbeat
from drivetrain.plugin.datasets import note_batch
from drivetrain_torch._resume import Epoch, Progress, current_state, load_state, start_epoch
from drivetrain_torch._sampling import pass_epoch

__all__ = ["PreparedLoader", "map_tensors", "wrap"]


def wrap(
    loader: DataLoader[Any],
    *,
    device: torch.device | None,
    auto_transfer: bool,
    world_size: int = 1,
    replay: bool = True,
) -> PreparedLoader:
    """Return a copy of a data loader that moves each batch to a device.

    The copy is an object of a class that derives from :class:`PreparedLoader` and from the loader's class, so it has
    all attributes and methods of the loader.

    Args:
        loader: the data loader.
        device: the device to move batches to, or None not to move them.
        auto_transfer: on a GPU, copy the next batch on a separate CUDA stream while the current batch is processed.
        world_size: the number of workers that share the data.
        replay: when an epoch is resumed, load the batches again that were read, if this is necessary for the same
            random numbers.
    """
    prepared: Any = copy.copy(loader)
    if not isinstance(loader, PreparedLoader):
        prepared.__class__ = _prepared_class(type(loader))
    prepared._prepared_device = device
    # A loader or a stream that saves its own position would be one batch ahead of the train function.
    ahead = _has_own_state(loader) or hasattr(loader.dataset, "state_dict")
    prepared._prepared_overlaps = auto_transfer and device is not None and device.type == "cuda" and not ahead
    prepared._prepared_progress = Progress(world_size, replay)
    result: PreparedLoader = prepared
    return result


_classes: dict[type[Any], type[PreparedLoader]] = {}


def _prepared_class(kind: type[Any]) -> type[PreparedLoader]:
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[kind] = type(kind.__name__, (PreparedLoader, kind), names)
    return _classes[kind]


def _has_own_state(loader: DataLoader[Any]) -> bool:
    """Return True if the class of a loader saves the position itself, as StatefulDataLoader of torchdata does."""
    return any("state_dict" in vars(kind) for kind in type(loader).__mro__ if kind.__module__ != __name__)


def _unpickle(kind: type[DataLoader[Any]], state: Mapping[str, Any]) -> PreparedLoader:
    loader = _prepared_class(kind).__new__(_prepared_class(kind))
    vars(loader).update(state)
    return loader


class PreparedLoader(DataLoader[Any]):
    """The methods that ``prepare_data_loader`` adds to a data loader. Use :func:`wrap` to create an object.

    Attributes:
        repeated_rows: the number of rows at the end of the current batch that another batch contains as well, so that
            all ranks have the same number of rows. It is 0, except in the last batch of some ranks. Leave these rows
            out of metrics: count the first ``len(labels) - loader.repeated_rows`` rows. A loader that yields batches
            out of order (``in_order=False``) does not support this attribute.
    """

    repeated_rows: int = 0
    _prepared_device: torch.device | None
    _prepared_overlaps: bool
    _prepared_runs: bool = False
    _prepared_progress: Progress

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self).__mro__[2]  # the class of the loader, after the classes that this module has added
        return _unpickle, (kind, vars(self))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, batches = start_epoch(
            self, self._prepared_progress, super().__iter__, running=self._has_running_processes()
        )
        self._prepared_runs = True
        if self._prepared_overlaps:
            batches = self._copied_ahead(batches)
        elif (device := self._prepared_device) is not None:
            batches = (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)
        return self._counted(batches, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch to the samplers and to the dataset.

        Every object that has a method ``set_epoch`` receives the number: the loader's own class, its samplers, dataset
        and ``collate_fn``, and the datasets and samplers that they contain, such as the parts of a ``ConcatDataset``.

        After :meth:`load_state_dict`, the number of the epoch of the state keeps the position in this epoch. Another
        number discards the position: the next iteration starts at the first row.
        """
        self._prepared_progress.pass_epoch(epoch)
        self._pass_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch. Save it with the model; :meth:`load_state_dict` resumes from it.

        The position counts the batches that the train function has received, not prefetched ones. It assumes that all
        ranks have received the same number. After the loop over the batches has ended, the position is the start of the
        next epoch. A class of loaders that has this method, such as ``StatefulDataLoader``, returns its own state.

        Returns:
            Values that JSON can represent. They are the same on all ranks, except for ``"generators"``, the states of
            the random number generators at the start of the epoch, if the generators of the ranks differ.

        Raises:
            ConfigurationError: the loader yields batches out of order.
        """
        if _has_own_state(self):
            state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
            return state
        return current_state(self, self._prepared_progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a position. Later iterations read all rows again.

        With the same number of workers, the remaining batches are the same as without the interruption. With another
        number or another batch size, the rows that no rank has read are split again. The epoch of the state is passed
        on as by :meth:`set_epoch`, if the interrupted run had called that method.

        Args:
            state: the return value of :meth:`state_dict`, from any rank.

        Raises:
            ConfigurationError: the state belongs to other data; or the unread rows have to be split again, and the
                loader reads an iterable dataset, or has a custom sampler; or its processes are already running.
        """
        if _has_own_state(self):
            super().load_state_dict(state)  # type: ignore[misc]
            return
        running = self._has_running_processes()
        position = load_state(self, self._prepared_progress, state, running=running)
        if position.passed_epoch is not None:
            self._pass_epoch(position.passed_epoch)

    def _pass_epoch(self, epoch: int) -> None:
        if callable(own := getattr(super(), "set_epoch", None)):
            own(epoch)
        pass_epoch(self, epoch, processes_are_running=self._has_running_processes())

    def _has_running_processes(self) -> bool:
        return self._prepared_runs and self.persistent_workers

    def _counted(self, batches: Iterator[Any], epoch: Epoch) -> Iterator[Any]:
        self.repeated_rows = 0
        number, last, states = epoch.batches, epoch.last, epoch.states
        for batch in batches:
            heartbeat()
            epoch.batches = number = number + 1
            if states is not None:
                epoch.part = states.popleft()
            if number == last:  # setting an attribute of a DataLoader takes longer than the rest of this loop
                self.repeated_rows = epoch.repeated_rows
            note_batch(batch, number - 1, self.repeated_rows)
            yield batch
        self._prepared_progress.end(epoch)

    def _copied_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        device = self._prepared_device
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
