"""Dataset providers for the conformance kit's own tests: a correct one, and broken ones."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain import ConfigurationError
from drivetrain.plugin import DatasetProvider, SplitRequest


@dataclass(frozen=True)
class Numbers:
    rows: int


@dataclass
class NumberShard:
    """Every ``step``-th number, starting with ``first``; all ranks get the same number of batches."""

    rows: int
    first: int = 0
    step: int = 1
    group_size: int = 1
    skipped: int = 0
    position: Mapping[str, Any] | None = None
    batches: int = 0
    states: list[dict[str, Any]] = field(default_factory=list)

    def numbers(self) -> list[int]:
        return [n for n in range(self.rows) if n // self.group_size % self.step == self.first]

    def iter_batches(self, *, batch_size: int | None = 256) -> Iterator[dict[str, list[int]]]:
        skipped, self.skipped, self.batches = self.skipped, 0, self.skipped
        numbers, size = self.numbers(), batch_size or self.rows
        if skipped and self.position is not None:
            numbers = self.unread(self.position, size)
            skipped = 0
        count = math.ceil(math.ceil(self.rows / self.step) / size)
        for start in range(skipped * size, len(numbers), size):
            self.batches += 1
            part = numbers[start : start + size]
            yield {"id": part, "group": [n // 10 for n in part]}
        if len(numbers) <= (count - 1) * size and self.group_size == 1 and not skipped:
            yield {"id": [], "group": []}
        self.batches = 0

    def unread(self, position: Mapping[str, Any], size: int) -> list[int]:
        """Return this rank's part of the rows that the workers of another world size have not read."""
        read = {
            n
            for rank in range(position["world_size"])
            for n in list(range(rank, self.rows, position["world_size"]))[: position["batches"] * size]
        }
        return [n for n in range(self.rows) if n not in read][self.first :: self.step]

    def state_dict(self) -> dict[str, Any]:
        self.states = [{"batches": self.batches, "world_size": self.step}]
        return self.states[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["world_size"] != self.step and self.position != state:
            raise ConfigurationError("load_state_dict(): expected the position of the checkpoint")
        self.skipped = state["batches"]

    def take_state(self) -> dict[str, Any] | None:
        return self.states.pop() if self.states else None


class NumberDatasets(DatasetProvider):
    accepted = "numbers"

    def accepts(self, dataset: object) -> bool:
        return isinstance(dataset, Numbers)

    def open(self, name: str, dataset: Numbers, *, keep_together: str | None = None) -> tuple[Numbers, int]:
        return dataset, 1 if keep_together is None else 10

    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        numbers, group_size = opened
        if request.whole:
            return [NumberShard(numbers.rows) for _ in range(request.world_size)]
        return [
            NumberShard(
                numbers.rows, rank, request.world_size, group_size, position=self.position_for_another_size(request)
            )
            for rank in range(request.world_size)
        ]

    @staticmethod
    def position_for_another_size(request: SplitRequest) -> Mapping[str, Any] | None:
        same = request.position is None or request.position["world_size"] == request.world_size
        return None if same else request.position


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
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return [ReadOnce(opened[0].rows, rank, request.world_size) for rank in range(request.world_size)]


class IgnoresGroups(NumberDatasets):
    def open(self, name: str, dataset: Numbers, *, keep_together: str | None = None) -> tuple[Numbers, int]:
        return dataset, 1


class IgnoresState(NumberShard):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = 0


class ForgetsItsPosition(NumberDatasets):
    def split(self, opened: tuple[Numbers, int], request: SplitRequest) -> Sequence[Any]:
        return [IgnoresState(opened[0].rows, rank, request.world_size) for rank in range(request.world_size)]
