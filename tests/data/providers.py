"""Dataset providers for the conformance kit's own tests: a correct one, and broken ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.plugin import DatasetProvider
from drivetrain.plugin.datasets import SplitRequest


@dataclass(frozen=True)
class Numbers:
    rows: int


@dataclass
class NumberShard:
    """Every ``step``-th number, starting with ``first``; all ranks get the same number of batches.

    Attributes:
        start: the number at which the next iteration starts.
        position: the number of numbers that all ranks together have read.
    """

    rows: int
    first: int = 0
    step: int = 1
    group_size: int = 1
    start: int = 0
    position: int = 0
    states: list[dict[str, Any]] = field(default_factory=list)

    def iter_batches(self, *, batch_size: int | None = 256) -> Iterator[dict[str, list[int]]]:
        start, self.start = self.start, 0
        size = (batch_size or max(1, self.rows)) * self.step
        for number in range(start, self.rows, size):
            self.position = min(number + size, self.rows)
            part = [n for n in range(number, self.position) if n // self.group_size % self.step == self.first]
            yield {"id": part, "group": [n // 10 for n in part]}
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        self.states = [{"read": self.position}]
        return self.states[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = self.position = state["read"]

    def take_state(self) -> dict[str, Any] | None:
        return self.states.pop() if self.states else None


class NumberDatasets(DatasetProvider):
    accepted = "numbers"
    shard = NumberShard

    def accepts(self, dataset: object) -> bool:
        return isinstance(dataset, Numbers)

    def open(self, name: str, dataset: Numbers, *, keep_together: str | None = None) -> tuple[Numbers, int]:
        return dataset, 1 if keep_together is None else 10

    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        numbers, group_size = opened
        ranks, world_size = range(request.world_size), request.world_size
        if request.whole:
            return [self.shard(numbers.rows) for _ in ranks]
        return [self.shard(numbers.rows, rank, world_size, group_size) for rank in ranks]


class OmitsRows(NumberDatasets):
    """Gives all ranks the same number of rows."""

    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        rows = opened[0].rows
        return super().split((Numbers(rows if request.whole else rows - rows % request.world_size), opened[1]), request)


class AcceptsAnything(NumberDatasets):
    def accepts(self, dataset: object) -> bool:
        return True


class AcceptsNothing(NumberDatasets):
    def accepts(self, dataset: object) -> bool:
        return False


class ImportsALibrary(NumberDatasets):
    def accepts(self, dataset: object) -> bool:
        return isinstance(dataset, importlib.import_module("numpy").ndarray)


class OverlappingShards(NumberDatasets):
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return [NumberShard(opened[0].rows) for _ in range(request.world_size)]


class LosesRows(NumberDatasets):
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return super().split((Numbers(opened[0].rows - 1), opened[1]), request)


class OneShardForAll(NumberDatasets):
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return [NumberShard(opened[0].rows)]


class AlwaysSplits(NumberDatasets):
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return super().split(opened, SplitRequest(name=request.name, world_size=request.world_size))


class UnevenShards(NumberDatasets):
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return [NumberShard(opened[0].rows), *(NumberShard(0) for _ in range(1, request.world_size))]


class ReadOnce(NumberShard):
    def iter_batches(self, *, batch_size: int | None = 256) -> Iterator[dict[str, list[int]]]:
        yield from super().iter_batches(batch_size=batch_size)
        self.rows = 0


class OneEpoch(NumberDatasets):
    shard = ReadOnce


class IgnoresGroups(NumberDatasets):
    def open(self, name: str, dataset: Numbers, *, keep_together: str | None = None) -> tuple[Numbers, int]:
        return dataset, 1


class ContinuingShard(NumberShard):
    def iter_batches(self, *, batch_size: int | None = 256) -> Iterator[dict[str, list[int]]]:
        self.start = self.position
        yield from super().iter_batches(batch_size=batch_size)


class ContinuesAfterABreak(NumberDatasets):
    shard = ContinuingShard


class IgnoresState(NumberShard):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class ForgetsItsPosition(NumberDatasets):
    shard = IgnoresState


class RankState(NumberShard):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": self.first}


class SavesTheRank(NumberDatasets):
    shard = RankState


class SkipsInSplit(NumberDatasets):
    shard = IgnoresState

    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        shards = super().split(opened, request)
        for shard in shards:
            shard.start = (request.position or {"read": 0})["read"]
        return shards


class CurrentPosition(NumberShard):
    def take_state(self) -> dict[str, Any] | None:
        return {"read": self.position} if super().take_state() else None


class TakesTheCurrentPosition(NumberDatasets):
    shard = CurrentPosition


class StoredForever(NumberShard):
    def take_state(self) -> dict[str, Any] | None:
        return self.states[0] if self.states else None


class TakesAPositionTwice(NumberDatasets):
    shard = StoredForever


class CountsFromTheStart(NumberShard):
    resumed_at = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.resumed_at = state["read"]

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.position - self.resumed_at}


class ResumesOnce(NumberDatasets):
    shard = CountsFromTheStart
