"""The positions of data loaders and dataset shards: saved, restored, and compared with the start of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from drivetrain._hooks.dataset import DatasetShard
from drivetrain.errors import ConfigurationError

__all__ = ["EpochPhase", "Positions"]

_LOADERS, _SHARDS = "loaders", "shards"
_SHARD_PREFIX = "dataset "


class EpochPhase(Enum):
    """How far the data of the current epoch has been read."""

    UNREAD = "unread"
    INSIDE = "inside"
    COMPLETE = "complete"
    UNKNOWN = "unknown"


class _Place(NamedTuple):
    """The place in the data that a state of the common format describes.

    Attributes:
        epoch: the number of epochs that were started before this place.
        batches: the number of batches that were read in this epoch; 0 at its start.
    """

    epoch: int
    batches: int


def _place(state: object) -> _Place | None:
    """Return the place that a state describes; None if the state has another format."""
    if not isinstance(state, Mapping):
        return None
    epoch, batches = state.get("epoch"), state.get("batches")
    return _Place(epoch, batches) if isinstance(epoch, int) and isinstance(batches, int) else None


class Positions:
    """The data loaders and dataset shards of one rank.

    Args:
        loaders: data loaders and samplers by name. Each has ``state_dict`` and ``load_state_dict``, or ``set_epoch``,
            or all three. The first one that is read in an epoch decides whether the epoch is complete.
        shards: the dataset shards by name. They decide if no loader does.
    """

    def __init__(self, loaders: Mapping[str, Any], shards: Mapping[str, DatasetShard]) -> None:
        self._loaders = dict(loaders)
        self._resumable = {name: loader for name, loader in loaders.items() if hasattr(loader, "state_dict")}
        self._shards = dict(sorted(shards.items(), key=lambda item: item[0] != "train"))
        self._start: dict[str, _Place | None] = {}
        self._steps_at_start: int | None = None
        self._warned: set[str] = set()

    @property
    def is_in_epoch(self) -> bool:
        """True between :meth:`begin_epoch` and :meth:`end_epoch`."""
        return self._steps_at_start is not None

    def split_shards(self) -> list[str]:
        """Return the names of the shards that do not have all rows of their dataset."""
        states = {name: self._state_of(name, shard, warn=False) for name, shard in self._shards.items()}
        for shard in self._shards.values():
            shard.take_state()  # otherwise, the next report would store this position in its checkpoint
        return [name for name, state in states.items() if state is None or state.get("world_size") != 1]

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to all loaders and samplers that accept it."""
        for loader in self._loaders.values():
            if callable(accept := getattr(loader, "set_epoch", None)):
                accept(epoch)

    def begin_epoch(self, steps: int) -> None:
        """Remember the places at the start of an epoch, or where a resumed epoch continues.

        Args:
            steps: the number of steps so far.
        """
        self._steps_at_start = steps
        self._start = dict(self._places())
        for shard in self._shards.values():
            shard.take_state()  # otherwise, the next report would store this position in its checkpoint

    def end_epoch(self) -> None:
        """Note that no epoch is current."""
        self._steps_at_start = None

    def phase(self, steps: int) -> EpochPhase:
        """Return how far the data of the current epoch has been read.

        Args:
            steps: the number of steps so far.
        """
        has_unread_loader = False
        for name, place in self._places():
            if place is None:
                continue
            if place != self._start.get(name):
                return EpochPhase.INSIDE if place.batches else EpochPhase.COMPLETE
            if place.batches and steps == self._steps_at_start:
                return EpochPhase.INSIDE
            has_unread_loader |= name in self._resumable
        return EpochPhase.UNREAD if has_unread_loader and steps == self._steps_at_start else EpochPhase.UNKNOWN

    def is_epoch_read(self, steps: int) -> bool:
        """Return True if the last batch of the current epoch was read, also before the loop over the batches has ended.

        Args:
            steps: the number of steps so far.
        """
        if self.phase(steps) is EpochPhase.COMPLETE:
            return True
        lengths = {name: len(loader) for name, loader in self._resumable.items() if hasattr(loader, "__len__")}
        places = dict(self._places())
        moved = [name for name, place in places.items() if place is not None and place != self._start.get(name)]
        if not moved:
            return False
        if (place := places[moved[0]]) is not None and moved[0] in lengths:
            return place.batches >= lengths[moved[0]]
        shard = self._shards.get(moved[0].removeprefix(_SHARD_PREFIX))
        return bool(getattr(shard, "is_epoch_read", False))

    def restarts_epoch(self, steps: int) -> bool:
        """Return True if an epoch that is saved now restarts, because nothing knows the position in it.

        A loader that saves a state of its own format may be inside the epoch, so the answer is False then.
        """
        has_other_state = any(_place(loader.state_dict()) is None for loader in self._resumable.values())
        return not has_other_state and self.phase(steps) is EpochPhase.UNKNOWN

    def save(self) -> dict[str, Any]:
        """Return the states of all loaders and shards. The shards also add them to the next reported checkpoint."""
        loaders = {name: loader.state_dict() for name, loader in self._resumable.items()}
        shards = {name: self._state_of(name, shard, warn=True) for name, shard in self._shards.items()}
        return {_LOADERS: loaders, _SHARDS: {name: state for name, state in shards.items() if state is not None}}

    def restore(self, saved: Mapping[str, Any], *, only_inside: bool = False) -> None:
        """Restore the states that :meth:`save` has returned, for the loaders and shards that still exist.

        Args:
            saved: the states.
            only_inside: leave out positions at the start of an epoch. :meth:`set_epoch` has begun that epoch, and the
                state of a loader contains the number of the epoch before.

        Raises:
            ConfigurationError: a state belongs to other data, or this number of workers cannot continue from it.
        """
        for kind, known in ((_LOADERS, self._resumable), (_SHARDS, self._shards)):
            for name, state in saved.get(kind, {}).items():
                place = _place(state)
                if name in known and not (only_inside and place is not None and not place.batches):
                    known[name].load_state_dict(state)

    def _places(self) -> Iterator[tuple[str, _Place | None]]:
        for name, loader in self._resumable.items():
            yield name, _place(loader.state_dict())
        for name, shard in self._shards.items():
            yield f"{_SHARD_PREFIX}{name}", _place(self._state_of(name, shard, warn=False))

    def _state_of(self, name: str, shard: DatasetShard, *, warn: bool) -> dict[str, Any] | None:
        """Return the state of a shard; None if its order cannot be reproduced."""
        save: Callable[[], dict[str, Any]] = shard.state_dict
        try:
            return save()
        except ConfigurationError as error:
            if warn and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"the position in dataset {name!r} is not saved: {error}", stacklevel=4)
            return None
