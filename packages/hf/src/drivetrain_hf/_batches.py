"""An iterable dataset of ready batches. Imports torch, so only functions import it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ["Batches"]


class Batches(IterableDataset[Any]):
    """Anything that can be iterated over, as a dataset of torch.

    Args:
        batches: what a model takes, one batch after the other.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)
