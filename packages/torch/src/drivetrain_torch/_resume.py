"""Tracks the position of a data loader, and makes its next iteration continue at a position.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from drivetrain import ConfigurationError
from drivetrain_torch._generators import States, capture, own_generators, playing, restore
from drivetrain_torch._order import KNOWN, Order, changes_batches, order_of, rest_of_epoch, takes_state
from drivetrain_torch._position import Plan, Position
from drivetrain_torch._sampling import index_sampler, repeated_rows

__all__ = ["Epoch", "Progress", "current_state", "load_state", "start_epoch"]


@dataclass(slots=True)
class Epoch:
    """An iteration over a loader.

    Attributes:
        start: the position at which the iteration has started.
        batches: the number of batches of the epoch that have been read.
        repeated_rows: the number of rows in the last batch that another batch contains as well.
        last: the number of the last batch, if there are such rows; otherwise None.
        states: the states of the sampler after the batches that are prefetched; None if the sampler has no state.
        part: the state of the sampler after the current batch.
    """

    start: Position
    batches: int
    repeated_rows: int = 0
    last: int | None = None
    states: collections.deque[Any] | None = None
    part: Any = None


@dataclass(slots=True)
class Progress:
    """The state of a loader that changes while it is iterated.

    Attributes:
        world_size: the number of workers that share the data.
        replays: load the batches that were read again if this is necessary for the same random numbers.
        epoch: the number of the next epoch that starts with its first row.
        passed_epoch: the last number that was passed to ``set_epoch``; None if there is none.
        resume_from: the position at which the next iteration starts; None to read an epoch from its first row.
        current: the latest iteration; None before the first one, and after its end.
        processes: the states of the generators when persistent processes were started; None if there are none.
        initial: the state of a stream before its first epoch, if a later state was loaded; otherwise None.
        recorder: records the states of the sampler, if it can save its own state; otherwise None.
        seed: the seed of the order of the last iteration, if that of a sampler of epochs.
    """

    world_size: int = 1
    replays: bool = True
    epoch: int = 0
    passed_epoch: int | None = None
    resume_from: Position | None = None
    current: Epoch | None = None
    processes: States | None = None
    initial: Any = None
    recorder: _Recorder | None = None
    seed: int | None = None

    def pass_epoch(self, epoch: int) -> None:
        """Make the next iteration that of another epoch. In the epoch of a loaded position, it still resumes there."""
        self.epoch = self.passed_epoch = epoch
        if self.resume_from is not None and self.resume_from.epoch != epoch:
            self.resume_from = None
        if self.current is not None and self.current.start.epoch != epoch:
            self.current = None

    def end(self, epoch: Epoch) -> None:
        """Note that an iteration has ended. The position is then the start of the next epoch."""
        if self.current is epoch:
            self.current = None


def current_state(loader: DataLoader[Any], progress: Progress) -> dict[str, Any]:
    """Return the position of a loader as values that JSON can represent."""
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "[DT-728] state_dict(): expected a loader that yields its batches in order, got in_order=False. Then "
            "the batches that were read are unknown. Create the loader with in_order=True"
        )
    if (epoch := progress.current) is not None:
        part = _state_of_stream(loader) if epoch.states is None else epoch.part
        return replace(epoch.start, batches=epoch.batches, part=part).as_dict()
    if progress.resume_from is not None:
        return progress.resume_from.as_dict()
    order = order_of(loader, progress.world_size)
    return Position(
        total=order.total,
        world_size=order.shards,
        epoch=progress.epoch,
        kind=order.kind,
        passed_epoch=progress.passed_epoch,
        generators=capture(own_generators(loader)),
        processes=progress.processes,
    ).as_dict()


def load_state(loader: DataLoader[Any], progress: Progress, state: Mapping[str, Any], *, running: bool) -> Position:
    """Make the next iteration continue at a position, and return this position.

    Args:
        loader: the loader.
        progress: its state.
        state: the position.
        running: True if processes of the loader are running that would continue with the next iteration.
    """
    position = Position.from_dict(state)
    order = order_of(loader, progress.world_size)
    _check(position, order, loader, running=running)
    progress.resume_from = None if position.plan is None else position
    progress.epoch, progress.passed_epoch = position.epoch, position.passed_epoch
    progress.current, progress.processes = None, position.processes
    if position.plan is None:
        restore(position.generators, own_generators(loader))
    return position


def _check(position: Position, order: Order, loader: DataLoader[Any], *, running: bool) -> None:
    """Raise an error if a loader cannot continue at a position."""
    if position.total != order.total:
        raise _error(f"a dataset with {order.total} rows", f"a dataset with {position.total} rows", "Use the same data")
    if running:
        raise _error(
            "a loader that has not been iterated",
            "one with running processes (persistent_workers=True)",
            "Load the state before the first iteration, or prepare another loader",
        )
    if position.plan is None or position.kind == order.kind == "stateful":
        return
    is_known = order.kind in KNOWN and position.kind in KNOWN
    if is_known:
        if position.kind == "loader" and loader.generator is None:
            raise _error("a loader with a generator", "a loader without one", "Pass generator= to the DataLoader")
        return
    if order.kind == "stream" and position.part is not None and _state_of_stream(loader) is not None:
        return
    if position.start is not None or not _has_same_batches(loader, position, order):
        raise _error(
            _describe(position.kind, position.world_size, position.plan.batch_size, position.loader_processes),
            _describe(order.kind, order.shards, order.batch_size, loader.num_workers),
            "The rest of such an epoch cannot be split again. Resume with the same number of workers and the same "
            "options, restart the epoch by set_epoch, or use a dataset with a length and shuffle=True, which "
            "prepare_data_loader can split",
        )


def _describe(kind: str, world_size: int, batch_size: int | None, processes: int) -> str:
    names = {"stream": "an iterable dataset", "other": "a custom sampler", "stateful": "a sampler with a state_dict"}
    in_processes = f" and {processes} loader processes" if processes else ""
    return f"{names.get(kind, 'a sampler of torch')} on {world_size} workers with batch_size={batch_size}{in_processes}"


def _error(expected: str, got: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"[DT-728] load_state_dict(): expected the state of {expected}, got {got}. {remedy}")


def start_epoch(
    loader: DataLoader[Any], progress: Progress, create: Callable[[], Iterator[Any]], *, running: bool
) -> tuple[Epoch, Iterator[Any]]:
    """Start an iteration, which resumes an epoch if a position has been loaded.

    Args:
        loader: the loader.
        progress: its state.
        create: starts an iteration of the loader, of whatever its samplers sample at this moment.
        running: True if processes of the loader are running that continue with this iteration.

    Returns:
        The state of the iteration, and its batches.
    """
    position, progress.resume_from = progress.resume_from, None
    order = order_of(loader, progress.world_size)
    number = progress.epoch
    progress.epoch += 1
    if position is None:
        if order.seed is not None and order.seed == progress.seed and progress.passed_epoch is None:
            warnings.warn(
                "this data loader shuffles, but reads its rows in the same order as before, because no epoch was "
                "passed to it. Pass the loader to TrainState(loader=...), or call loader.set_epoch(epoch) at the start "
                "of each epoch",
                stacklevel=3,
            )
        progress.seed = order.seed
        epoch, batches = _start_whole(loader, progress, order, number, create, running=running)
    elif order.kind == "stateful" or _delegates(loader, progress, position, order):
        epoch, batches = _continue_part(loader, progress, position, order, create)
    else:
        epoch, batches = _continue(loader, progress, position, order, create)
    if loader.persistent_workers and progress.processes is None:
        progress.processes = epoch.start.generators
    progress.current = epoch
    return epoch, batches


def _start_whole(
    loader: DataLoader[Any],
    progress: Progress,
    order: Order,
    number: int,
    create: Callable[[], Iterator[Any]],
    *,
    running: bool,
) -> tuple[Epoch, Iterator[Any]]:
    """Start an epoch from its first row."""
    names = [] if order.kind in ("sequence", "seed") and not loader.num_workers else ["torch"]
    if order.kind in ("stream", "other"):
        names = ["torch", "python", "numpy"]  # a user's sampler or dataset can draw from any of them
    start = Position(
        total=order.total,
        world_size=order.shards,
        plan=Plan(order.batch_size, order.drop_last, None, order.seed, order.drops_rows),
        epoch=number,
        kind=order.kind,
        passed_epoch=progress.passed_epoch,
        loader_processes=loader.num_workers,
        generators=capture(own_generators(loader), *names),
        processes=progress.processes,
    )
    epoch = Epoch(start, 0)
    if repeated := repeated_rows(loader):
        epoch.repeated_rows, epoch.last = repeated, len(index_sampler(loader))
    if progress.initial is not None:
        loader.dataset.load_state_dict(progress.initial)  # type: ignore[attr-defined]
        progress.initial = None
    if order.kind == "stateful":
        return epoch, _record(loader, progress, epoch, create, running=running)
    if progress.processes is None or running:
        return epoch, create()
    # In the interrupted run, the processes had been started before this epoch.
    indices = _Indices(index_sampler(loader))
    if order.kind != "stream":
        indices.draw()
    with _starting_processes(loader, progress.processes):
        if order.kind == "stream":
            return epoch, create()
        with _sampling(loader, indices):
            return epoch, create()


def _continue(
    loader: DataLoader[Any],
    progress: Progress,
    position: Position,
    order: Order,
    create: Callable[[], Iterator[Any]],
) -> tuple[Epoch, Iterator[Any]]:
    """Continue an epoch at a position."""
    own = own_generators(loader)
    plan = position.plan
    assert plan is not None
    same = (position.world_size, plan.batch_size, plan.drop_last, plan.drops_rows)
    if same != (order.shards, order.batch_size, order.drop_last, order.drops_rows):
        position = replace(
            position,
            world_size=order.shards,
            start=position.read_rows(),
            batches=0,
            plan=Plan(order.batch_size, order.drop_last, None, plan.seed, order.drops_rows),
        )
    position = replace(position, loader_processes=loader.num_workers)
    epoch = Epoch(position, position.batches)
    sampled: Any = index_sampler(loader)
    if order.kind in KNOWN:
        sampled, repeated = rest_of_epoch(loader, order, _rows_of(position, own), position.start or 0)
        if repeated:
            epoch.repeated_rows, epoch.last = repeated, len(sampled)
    if order.kind == "stream":
        return epoch, _replayed(loader, position, create)
    # The random numbers of persistent processes also depend on earlier epochs, which are not loaded again.
    replays = loader.num_workers > 0 and progress.replays and position.processes is None
    if replays or changes_batches(loader):
        with _sampling(loader, _Indices(sampled, later=index_sampler(loader))):
            return epoch, _replayed(loader, position, create)
    with playing(position.generators, own):
        indices = _Indices(sampled, skip=position.batches, later=index_sampler(loader))
        if position.processes is not None:  # their seed had been drawn before this epoch
            indices.draw()
        with _sampling(loader, indices), _starting_processes(loader, position.processes):
            batches = create()
        indices.draw()
    return epoch, batches


def _replayed(loader: DataLoader[Any], position: Position, create: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start an iteration as at the start of an epoch, and discard the batches that were read."""
    with playing(position.generators, own_generators(loader)), _starting_processes(loader, position.processes):
        batches = create()
        collections.deque(itertools.islice(batches, position.batches), maxlen=0)
    return batches


def _starting_processes(loader: DataLoader[Any], states: States | None) -> contextlib.AbstractContextManager[None]:
    """Let the loader draw the seed of its processes from earlier states of the generators, unless they are None."""
    if states is None:
        return contextlib.nullcontext()
    return playing(states, own_generators(loader), sets_back=True)


def _delegates(loader: DataLoader[Any], progress: Progress, position: Position, order: Order) -> bool:
    """Return True if a stream restores its own state, and is not read again from the start of the epoch."""
    if order.kind != "stream" or position.part is None or _state_of_stream(loader) is None:
        return False
    return not progress.replays or position.start is not None or not _has_same_batches(loader, position, order)


def _has_same_batches(loader: DataLoader[Any], position: Position, order: Order) -> bool:
    """Return True if the epoch of a position was read in the batches that the loader yields now."""
    assert position.plan is not None
    saved = (position.kind, position.world_size, position.plan.batch_size, position.plan.drop_last)
    if saved != (order.kind, order.shards, order.batch_size, order.drop_last):
        return False
    return order.kind != "stream" or loader.num_workers == position.loader_processes


def _continue_part(
    loader: DataLoader[Any], progress: Progress, position: Position, order: Order, create: Callable[[], Iterator[Any]]
) -> tuple[Epoch, Iterator[Any]]:
    """Continue an epoch whose sampler or stream restores its own state."""
    plan = Plan(order.batch_size, order.drop_last)
    with playing(position.generators, own_generators(loader)):
        if order.kind == "stateful":
            epoch = Epoch(replace(position, world_size=order.shards, plan=plan), position.batches)
            _stateful_sampler(loader).load_state_dict(position.part)
            return epoch, _record(loader, progress, epoch, create, running=False)
        position = replace(position, world_size=order.shards, plan=plan, start=0, batches=0, loader_processes=0)
        progress.initial = _state_of_stream(loader)
        loader.dataset.load_state_dict(position.part)  # type: ignore[attr-defined]
        return Epoch(position, 0), create()


def _state_of_stream(loader: DataLoader[Any]) -> Any:
    """Return the state of a stream that can save it; otherwise None. In loader processes, it cannot be reached."""
    dataset: Any = loader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream and not loader.num_workers and takes_state(dataset):
        return copy.deepcopy(dataset.state_dict())
    return None


def _stateful_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader that can save its own state."""
    given = index_sampler(loader)
    return given if takes_state(given) else given.sampler


def _record(
    loader: DataLoader[Any], progress: Progress, epoch: Epoch, create: Callable[[], Iterator[Any]], *, running: bool
) -> Iterator[Any]:
    """Start an iteration of a sampler that can save its own state, and record its state after each batch."""
    if progress.recorder is None or not running:
        progress.recorder = _Recorder(index_sampler(loader), _stateful_sampler(loader))
    epoch.part = copy.deepcopy(progress.recorder.stateful.state_dict())
    processes = None if running else progress.processes
    with _sampling(loader, progress.recorder), _starting_processes(loader, processes):
        batches = create()
    epoch.states = progress.recorder.states
    return batches


class _Recorder:
    """Records the state of a sampler after each batch, because the loader may sample ahead of the train function."""

    def __init__(self, sampled: Any, stateful: Any) -> None:
        self.states: collections.deque[Any] = collections.deque()
        self.sampled = sampled
        self.stateful = stateful

    def __len__(self) -> int:
        return len(self.sampled)

    def __iter__(self) -> Iterator[Any]:
        self.states = collections.deque()
        return self._items(iter(self.sampled), self.states)

    def _items(self, items: Iterator[Any], states: collections.deque[Any]) -> Iterator[Any]:
        for item in items:
            states.append(copy.deepcopy(self.stateful.state_dict()))
            yield item


def _rows_of(position: Position, own: Mapping[str, torch.Generator]) -> Iterable[int]:
    """Return all rows of the epoch of a position, in order."""
    assert position.total is not None
    assert position.plan is not None
    rows = range(position.total)
    if position.kind == "sequence":
        return rows
    if position.kind == "seed":
        return DistributedSampler(rows, num_replicas=1, rank=0, seed=position.plan.seed or 0)  # type: ignore[arg-type]
    generator = own.get(position.kind)
    if generator is None and position.kind == "sampler":  # the sampler has been replaced, because there are more ranks
        generator = torch.Generator()
        restore(position.generators, {"sampler": generator})
    return RandomSampler(rows, generator=generator)


class _Indices:
    """The batches of indices that a loader samples in the next iteration. Later iterations read whole epochs.

    Attributes:
        later: samples the indices of later iterations, in persistent processes.
        is_created: True if the iteration has been created.
    """

    def __init__(self, first: Any, *, skip: int = 0, later: Any = None) -> None:
        """Start with ``first``, without its first ``skip`` items."""
        self.later = first if later is None else later
        self.is_created = False
        self._first = first
        self._skip = skip
        self._source: Iterator[Any] | None = None
        self._drawn: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.later)

    def __iter__(self) -> Iterator[Any]:
        if self.is_created:
            return iter(self.later)
        if self._drawn is None:  # DataLoader calls this twice, and then uses the second iterator
            self._source = iter(self._first)
        return self._items()

    def draw(self) -> None:
        """Draw the order now, while the generators are in the right state, and skip the batches that were read."""
        if self._drawn is None:
            self._source = iter(self._first) if self._source is None else self._source
            self._drawn = list(itertools.islice(self._source, self._skip, self._skip + 1))

    def _items(self) -> Iterator[Any]:
        self.draw()
        yield from self._drawn or ()
        yield from self._source or ()


@contextlib.contextmanager
def _sampling(loader: DataLoader[Any], sampled: _Indices | _Recorder) -> Iterator[None]:
    """Replace the sampler of the iterator that is created within the context.

    DataLoader forbids to set these attributes after its creation.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own, vars(loader)[name] = vars(loader)[name], sampled
    try:
        yield
    finally:
        vars(loader)[name] = own
        if isinstance(sampled, _Indices):
            sampled.is_created = True
