"""Iterable datasets of torch, made of other things. Imports torch, so only functions import it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ["Batches", "ShardBatches", "ShardRows"]


class Batches(IterableDataset[Any]):
    """Anything that can be iterated over, as a dataset of torch.

    Args:
        batches: what a model takes, one batch after the other.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class ShardRows(IterableDataset[dict[str, Any]]):
    """The rows of a dataset's shard; it has a length if the dataset has.

    Args:
        shard: what ``get_dataset_shard`` returns.

    Attributes:
        total: rows of the dataset; None where only reading tells.
    """

    def __init__(self, shard: Any) -> None:
        self.shard = shard
        self.total: int | None = getattr(shard, "total", None)  # Ray's shards have none

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.shard.iter_rows())

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("how many rows the dataset has is only known when it was read")
        return self.total


class ShardBatches(IterableDataset[Any]):
    """A shard's rows as batches, as many on each rank.

    Args:
        shard: what ``get_dataset_shard`` returns.
        batch_size: rows of a batch.
        collate: makes a batch of rows.
        drop_last: leave out what does not fill a batch.
        names: of the columns to use; None for all.
    """

    def __init__(
        self,
        shard: Any,
        batch_size: int,
        collate: Callable[[list[dict[str, Any]]], Any],
        *,
        drop_last: bool,
        names: Collection[str] | None,
    ) -> None:
        self._collate, self._names = collate, names
        drop_last = drop_last or batch_size == 1  # batches of one row cannot be split to make up their number
        self._tables = shard.iter_batches(batch_size=batch_size, drop_last=drop_last, batch_format="pyarrow")
        largest, smallest = getattr(shard, "largest_shard", 0), getattr(shard, "smallest_shard", 0)
        self._count = smallest // batch_size if drop_last else -(-largest // batch_size)

    def __iter__(self) -> Iterator[Any]:
        for table in self._tables:
            columns = [name for name in table.column_names if self._names is None or name in self._names]
            yield self._collate(table.select(columns).to_pylist())

    def __len__(self) -> int:
        if not self._count:
            raise TypeError("how many batches there are is only known when they were read")
        return self._count
