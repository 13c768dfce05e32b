"""Adds to checkpoints of Lightning: the random states and the positions of the data loaders on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import ConfigurationError, get_context
from drivetrain_torch import get_random_states, prepare_data_loader, set_random_states

if TYPE_CHECKING:
    import torch

__all__ = ["Resumption"]

_KEY = "drivetrain_random_states"
"""The key in Lightning's checkpoints for the states of the random number generators, and when they were saved."""

_RANKS = "drivetrain_ranks"
"""The key in the state of a loader for the states of all ranks."""


class Resumption:
    """Saves and restores the random states and the positions of the loaders for a training.

    Attributes:
        loaded: the entry of the checkpoint that is being restored; None if there is none, and after the first batch.
    """

    def __init__(self) -> None:
        self.loaded: Mapping[str, Any] | None = None
        self._loaders: list[Any] = []
        self._are_positions_known = True

    def save(self, checkpoint: dict[str, Any], after: str) -> None:
        """Add the states of all ranks to a checkpoint. Every rank calls this function.

        Args:
            checkpoint: the content of the checkpoint.
            after: what has just ended: ``"epoch"``, ``"validation"`` or ``"batch"``.
        """
        generators = [[each.get_state() for each in _generators(loader)] for loader in self._loaders]
        checkpoint[_KEY] = {"saved": after, "states": get_random_states(), "generators": generators}

    def load(self, checkpoint: Mapping[str, Any], *, is_training: bool) -> None:
        """Restore the random states for the next epoch, before Lightning starts to iterate over the data."""
        self._loaders, self._are_positions_known = [], True
        self.loaded = checkpoint.get(_KEY) if is_training else None
        self.restore()

    def restore(self) -> None:
        """Restore the random states of the checkpoint."""
        if self.loaded is not None:
            set_random_states(self.loaded["states"])

    def on_train_start(self, trainer: Any) -> None:
        """Restore the random states again before the next batch is loaded, if the iteration has begun."""
        if self.loaded is None:
            return
        saved = self.loaded["saved"]
        if (saved == "batch" and self._are_positions_known) or saved in _saved_before_another_iteration(trainer):
            self.restore()

    def on_first_batch(self, number: int) -> None:
        """Restore the random states again, if a loader has read batches to find its position inside the epoch.

        Args:
            number: the number of the batch in the epoch.
        """
        if number > 0 and not self._are_positions_known:
            self.restore()
        self.loaded = None

    def add_loader(self, loader: Any, epoch: int) -> Any:
        """Return a loader for the training that saves its position in Lightning's checkpoints.

        Args:
            loader: the loader, before its first iteration.
            epoch: the number of the epoch that begins with it.
        """
        from torch.utils.data import DataLoader

        # Lightning does this, too, but only after it has started the loader processes, which sample at once.
        for sampler in (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        ):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

        if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict") and _has_length(loader):
            loader = prepare_data_loader(loader, add_dist_sampler=False, move_to_device=False)
            # Lightning loads the saved position only within an epoch.
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
        self._are_positions_known &= hasattr(loader, "repeated_rows")
        if isinstance(loader, DataLoader) and hasattr(loader, "state_dict"):
            _save_all_ranks(loader)
        if self.loaded is not None and self.loaded["saved"] == "epoch":
            saved = self.loaded.get("generators", ())[len(self._loaders) : len(self._loaders) + 1]
            for generator, state in zip(_generators(loader), *saved or [()], strict=False):
                generator.set_state(state)
        self._loaders.append(loader)
        return loader


def _has_length(loader: Any) -> bool:
    """Return True if Lightning reads the batches of a loader one by one.

    If it does not know the number of batches, it reads one batch ahead of the training.
    """
    try:
        return len(loader) >= 0
    except TypeError:
        return False


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Yield the generators that the user has passed to a loader and to its sampler."""
    import torch

    for owner in (loader, getattr(loader, "sampler", None)):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            yield generator


def _save_all_ranks(loader: Any) -> None:
    """Make the state of a loader contain the states of all ranks.

    Lightning saves the state of rank 0 and loads it on all ranks, but each rank has drawn other random numbers. It
    calls ``state_dict`` on all ranks, because saving is a collective operation.
    """
    state_of_rank, load_state_of_rank = loader.state_dict, loader.load_state_dict

    def state_dict() -> dict[str, Any]:
        return {_RANKS: _gather(state_of_rank())}

    def load_state_dict(state: Mapping[str, Any]) -> None:
        ranks = state.get(_RANKS, [state])
        context = get_context()
        own = ranks[context.get_world_rank() if len(ranks) == context.get_world_size() else 0]
        try:
            load_state_of_rank(own)
        except ConfigurationError as error:
            warnings.warn(f"the interrupted epoch is read again from its start: {error}", stacklevel=2)

    vars(loader).update(state_dict=state_dict, load_state_dict=load_state_dict)


def _gather(value: Any) -> list[Any]:
    import torch.distributed as dist

    if get_context().get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _saved_before_another_iteration(trainer: Any) -> tuple[Literal["validation", "epoch"], ...]:
    """Return the kinds of checkpoints from which Lightning resumes by iterating over the data once more than necessary.

    From a checkpoint that was saved after a validation, Lightning first completes the epoch. Versions without
    ``is_resuming`` also start a second iteration if the checkpoint was saved after an epoch. The first iteration has
    drawn random numbers, so the states must be restored again before the second one.
    """
    return ("validation",) if hasattr(trainer.fit_loop, "is_resuming") else ("validation", "epoch")
