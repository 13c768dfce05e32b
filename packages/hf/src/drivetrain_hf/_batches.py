"""Subclasses of torch's ``IterableDataset`` that wrap other data.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ["Batches", "ShardBatches", "ShardRows"]


class Batches(IterableDataset[Any]):
    """Any iterable of batches, as a dataset of torch.

    Args:
        batches: the batches, in the form that a model takes.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class ShardRows(IterableDataset[dict[str, Any]]):
    """The rows of a dataset shard. The length is the number of rows of the whole dataset, if it is known.

    Args:
        shard: the shard returned by ``get_dataset_shard``.

    Attributes:
        total: the number of rows of the whole dataset, or None if it is unknown until the dataset has been read.
    """

    def __init__(self, shard: Any) -> None:
        self.shard = shard
        self.total: int | None = getattr(shard, "total", None)  # shards of Ray datasets do not have this attribute

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.shard.iter_rows())

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the number of rows is unknown until the dataset has been read")
        return self.total


class ShardBatches(IterableDataset[Any]):
    """The rows of a dataset shard in batches, with the same number of batches on each rank.

    Args:
        shard: the shard returned by ``get_dataset_shard``.
        batch_size: the number of rows per batch.
        collate: creates a batch from a list of rows.
        drop_last: drop the last rows if they do not fill a batch.
        names: names of the columns to use, or None for all.
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
        # With one row per batch, the ranks can only get the same number of batches if the last rows are dropped.
        drop_last = drop_last or batch_size == 1
        self._tables = shard.iter_batches(batch_size=batch_size, drop_last=drop_last, batch_format="pyarrow")
        largest, smallest = getattr(shard, "largest_shard", 0), getattr(shard, "smallest_shard", 0)
        self._count = smallest // batch_size if drop_last else -(-largest // batch_size)

    def __iter__(self) -> Iterator[Any]:
        for table in self._tables:
            columns = [name for name in table.column_names if self._names is None or name in self._names]
            yield self._collate(table.select(columns).to_pylist())

    def __len__(self) -> int:
        if not self._count:
            raise TypeError("the number of batches is unknown until they have been read")
        return self._count
