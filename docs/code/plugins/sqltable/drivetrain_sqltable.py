"""Tables of SQLite databases as datasets of drivetrain."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from drivetrain import ConfigurationError
from drivetrain.plugin import DatasetProvider, Shard
from drivetrain.plugin.datasets import SplitRequest


@dataclass(frozen=True)
class Table:
    """The object that users pass: `datasets={"train": Table("images.db", "train")}`."""

    path: str
    name: str


@dataclass(frozen=True)
class TableShard:
    """The rows of one worker. It is pickled, so it contains no connection."""

    table: Table
    first: int
    rows: int

    def iter_batches(
        self, *, batch_size: int | None = 256
    ) -> Iterator[dict[str, list[Any]]]:
        """Read the rows in batches: a list of values for each column."""
        query = f'select * from "{self.table.name}" order by rowid limit ? offset ?'
        with closing(sqlite3.connect(self.table.path)) as connection:
            cursor = connection.execute(query, (self.rows, self.first))
            names = [column[0] for column in cursor.description]
            while batch := cursor.fetchmany(batch_size or self.rows):
                columns = zip(*batch, strict=True)
                yield dict(zip(names, map(list, columns), strict=True))


class TableDatasets(DatasetProvider):
    """Splits a table into contiguous ranges of rows."""

    accepted = "a drivetrain_sqltable.Table"

    def accepts(self, dataset: object) -> bool:
        """Return True for objects of our class only."""
        return isinstance(dataset, Table)

    def open(
        self, name: str, dataset: Table, *, keep_together: str | None = None
    ) -> tuple[Table, int]:
        """Count the rows, so that a mistake is found before any worker is started."""
        super().open(
            name, dataset, keep_together=keep_together
        )  # refuses keep_together
        try:
            connection = sqlite3.connect(f"file:{dataset.path}?mode=ro", uri=True)
            (rows,) = connection.execute(
                f'select count(*) from "{dataset.name}"'
            ).fetchone()
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"dataset {name!r}: expected a table {dataset.name!r} in "
                f"{dataset.path}, got: {error}"
            ) from error
        connection.close()
        return dataset, rows

    def split(
        self, opened: tuple[Table, int], request: SplitRequest
    ) -> Sequence[Shard]:
        """Return a shard for each rank. All ranks get the same number of rows."""
        table, rows = opened
        if request.whole:
            return [TableShard(table, 0, rows)] * request.world_size
        size = rows // request.world_size
        return [
            TableShard(table, rank * size, size) for rank in range(request.world_size)
        ]
