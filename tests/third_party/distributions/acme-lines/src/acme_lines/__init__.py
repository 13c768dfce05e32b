"""Datasets in files with one JSON object per line: ``datasets={"train": LineFile("train.jsonl")}``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain import ConfigurationError
from drivetrain.plugin import DatasetProvider
from drivetrain.plugin.datasets import SplitRequest

__all__ = ["LineDatasets", "LineFile"]


@dataclass(frozen=True)
class LineFile:
    """A file with one JSON object per line; all objects have the same keys. All workers must have the file."""

    path: str


@dataclass(frozen=True)
class Index:
    """The positions in bytes at which the lines of a file start, and the end of the last line."""

    path: str
    offsets: Sequence[int]

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1


@dataclass
class LineShard:
    """The rows of one rank. All ranks together read the rows in order: one batch of each rank, and so on.

    So a single number describes the position of all ranks, and any number of workers can continue from it.
    """

    index: Index
    rank: int
    world_size: int
    _next_row: int = 0
    _resume_from: int = 0
    _saved: list[dict[str, Any]] = field(default_factory=list)

    def iter_batches(self, *, batch_size: int | None = 256) -> Iterator[dict[str, list[Any]]]:
        """Iterate over the rows, as lists by key. The last batch of an epoch may be smaller, or empty."""
        row, self._resume_from = self._resume_from, 0
        step = self.world_size * batch_size if batch_size else self.index.rows
        while row < self.index.rows:
            count = min(step, self.index.rows - row)
            first, last = (row + count * part // self.world_size for part in (self.rank, self.rank + 1))
            row = self._next_row = row + count
            yield self._read(first, last)
        self._next_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows that all ranks together have read."""
        self._saved = [{"row": self._next_row, "rows": self.index.rows}]
        return self._saved[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from a position."""
        if state.get("rows") != self.index.rows:
            raise ConfigurationError(f"{self.index.path}: expected a position in {self.index.rows} rows, got {state}")
        self._next_row = self._resume_from = state["row"]

    def take_state(self) -> dict[str, Any] | None:
        """Return the last saved position once."""
        return self._saved.pop() if self._saved else None

    def _read(self, first: int, last: int) -> dict[str, list[Any]]:
        with open(self.index.path, "rb") as file:
            file.seek(self.index.offsets[first])
            rows = [json.loads(line) for line in itertools.islice(file, max(1, last - first))]
        return {key: [row[key] for row in rows[: last - first]] for key in rows[0]}


class LineDatasets(DatasetProvider):
    """Splits line files by rows. Selected for objects of :class:`LineFile`."""

    accepted = "a LineFile"

    def accepts(self, dataset: object) -> bool:
        return isinstance(dataset, LineFile)

    def open(self, name: str, dataset: LineFile, *, keep_together: str | None = None) -> Index:
        super().open(name, dataset, keep_together=keep_together)  # refuses keep_together
        try:
            with open(dataset.path, "rb") as file:
                return Index(dataset.path, [0, *itertools.accumulate(map(len, file))])
        except OSError as error:
            raise ConfigurationError(f"dataset {name!r}: expected a readable file, got {error}") from error

    def split(self, opened: Index, request: SplitRequest) -> Sequence[LineShard]:
        ranks, world_size = range(request.world_size), request.world_size
        return [LineShard(opened, 0, 1) if request.whole else LineShard(opened, rank, world_size) for rank in ranks]
