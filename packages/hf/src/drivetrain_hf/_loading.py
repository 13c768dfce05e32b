"""Data loaders of Accelerate that continue in the middle of an epoch, for Accelerate and for a ``Trainer``.

This module imports torch and accelerate, so other modules import it only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.data_loader import DataLoaderShard, DataLoaderStateMixin
from accelerate.utils import synchronize_rng_states
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.plugin.state import random_states, restore_random_states
from drivetrain_torch import prepare_data_loader

__all__ = ["ResumableLoader", "TrainerLoader", "is_resumable"]


def is_resumable(loader: Any) -> bool:
    """Return True if the batches of a loader can be read by a :class:`ResumableLoader`."""
    # isinstance() is also True for loaders that say that they are another class.
    if type(loader) is not DataLoaderShard or loader.use_stateful_dataloader:
        return False
    return not isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__")


class ResumableLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A data loader that Accelerate has prepared, with a position that can be saved.

    It yields the same batches as the given loader, in the same order. The given loader reads one batch ahead of the
    training, so that random numbers of the dataset and of the model are drawn in an order that cannot be resumed.
    This one does not. Other attributes are those of the given loader.

    Args:
        loader: a loader of which :func:`is_resumable` is True.

    Attributes:
        iteration: the number of the current epoch, or of the next one.
    """

    def __init__(self, loader: Any) -> None:
        self.iteration = loader.iteration
        self._loader = loader
        self._batches = prepare_data_loader(
            loader.base_dataloader,
            add_dist_sampler=False,
            move_to_device=loader.device is not None,
            auto_transfer=False,
        )
        self._random: Mapping[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # before __init__, such as in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if self._loader.rng_types is not None:
            synchronize_rng_states(self._loader.rng_types, self._loader.synchronized_generator)
        self.begin()
        self.set_epoch(self.iteration)
        random, self._random = self._random, None
        batches = iter(self._batches)
        last = len(self) if random is None else self._remaining()
        if random is not None:
            restore_random_states(random)
        for number, batch in enumerate(batches, 1):
            self.end_of_dataloader = number == last
            yield batch
        self.iteration += 1
        self.end()

    def _remaining(self) -> int:
        """Return the number of batches in the rest of an epoch that has been resumed."""
        state = self.state_dict()
        if state["rows"] is None:
            return len(self) - int(state["batches"])
        [[first, end]], (size, drop_last, *_) = state["rows"], state["plan"]
        steps, rest = divmod(end - first, size * state["world_size"])
        return int(steps + bool(rest and not drop_last))

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch to the samplers and to the dataset."""
        self.iteration = epoch
        self._batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch, as :func:`drivetrain_torch.prepare_data_loader` describes it."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], random: Mapping[str, Any] | None = None) -> None:
        """Make the next iteration continue at a position.

        Args:
            state: the position.
            random: the random states to restore before the next batch is loaded, if the position is inside an epoch.
        """
        self._batches.load_state_dict(state)
        self.iteration = state["epoch"]
        self._random = random if state["batches"] else None


class _Batches(IterableDataset[Any]):
    """The batches of a :class:`ResumableLoader`, after placeholders for those that a ``Trainer`` skips."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.skipped = 0
        self.fetched: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """Return the number of rows, as a ``Trainer`` expects it of the dataset of a loader."""
        return len(self.loader.dataset)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        yield from (None for _ in range(skipped))
        for batch in self.loader:
            if skipped and self.fetched is not None:
                self.fetched = random_states()
            yield batch


def _as_is(batch: Any) -> Any:
    return batch


class TrainerLoader(DataLoader[Any]):
    """A :class:`ResumableLoader` in the form in which a ``Trainer`` continues within an epoch.

    A ``Trainer`` skips the batches that it has trained on. In a loader of batches, it takes them and drops them.
    Therefore this loader yields placeholders in their place after :meth:`resume`, and then continues at its position.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        super().__init__(_Batches(loader), batch_size=None, collate_fn=_as_is)
        self.inner = loader

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch to the samplers and to the dataset."""
        self.inner.set_epoch(epoch)

    def resume(self, state: Mapping[str, Any], random: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a position, after placeholders for the batches before it.

        Args:
            state: the position.
            random: the random states to restore before the next batch is loaded.
        """
        self.inner.load_state_dict(state, random)
        batches: Any = self.dataset
        batches.skipped, batches.fetched = state["batches"], random

    def take_random_states(self) -> Mapping[str, Any] | None:
        """Return the random states after the first batches were loaded, once; None if nothing was resumed."""
        batches: Any = self.dataset
        states: Mapping[str, Any] | None = batches.fetched
        batches.fetched = None
        return states
