"""The provider for all datasets that are read as Arrow tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drivetrain.plugin import DatasetProvider
from drivetrain.plugin.datasets import SplitRequest
from drivetrain_data._shard import TableShard
from drivetrain_data._sources import ACCEPTED, Source, is_dataset, open_dataset

__all__ = ["TableDatasets"]


class TableDatasets(DatasetProvider):
    """Splits files, tables, data frames, dicts of arrays and Hugging Face datasets."""

    accepted = ACCEPTED
    shuffles = True
    shares = True

    def accepts(self, dataset: object) -> bool:
        """See :class:`drivetrain.plugin.DatasetProvider`."""
        return is_dataset(dataset)

    def open(self, name: str, dataset: Any, *, keep_together: str | None = None) -> Source:
        """See :class:`drivetrain.plugin.DatasetProvider`.

        This reads the schema and the number of rows and, if ``keep_together`` names a column, also this column.
        """
        source = open_dataset(name, dataset)
        return source if keep_together is None else source.keeping_together(keep_together)

    def split(self, opened: Source, request: SplitRequest) -> list[TableShard]:
        """See :class:`drivetrain.plugin.DatasetProvider`."""
        return [replace(shard, is_shared=request.is_shared) for shard in opened.split(request)]
