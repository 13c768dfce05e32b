"""Gives categories the same codes in all shards of datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError
from drivetrain_data._shard import Reader, TableShard

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Categories"]


class Categories:
    """The categories of the categorical columns of datasets, with a code for each category.

    The code of a category is the order in which it was added, and does not depend on the dataset or the worker.
    """

    def __init__(self) -> None:
        self._of_column: dict[str, pa.Array] = {}

    def add(self, shard: TableShard) -> None:
        """Read the categorical columns of a shard, and add their categories.

        Raises:
            ConfigurationError: a column has categories of another type than before.
        """
        from pyarrow import types

        names = [field.name for field in shard.schema() if types.is_dictionary(field.type)]
        for table in shard.reader.tables(names) if names else ():
            for name in names:
                for chunk in table.column(name).chunks:
                    self._of_column[name] = _union(name, self._of_column.get(name), chunk.dictionary)

    def recode(self, shard: TableShard) -> TableShard:
        """Return a shard with the same rows, in which every category has its code."""
        if not self._of_column:
            return shard
        return replace(shard, reader=_Recoded(shard.reader, dict(self._of_column)))


@dataclass(frozen=True)
class _Recoded:
    """Reads rows, and replaces the codes of categories with codes that are the same on every worker.

    Attributes:
        reader: reads the rows.
        categories: for each categorical column, its categories. The new code of a category is its index in them.
    """

    reader: Reader
    categories: Mapping[str, pa.Array]

    @property
    def fresh(self) -> bool:
        """See :class:`Reader`."""
        return False

    @property
    def converts(self) -> bool:
        """See :class:`Reader`."""
        return self.reader.converts

    def tables(self, columns: Sequence[str] | None = None, skip: int = 0, **options: Any) -> Iterator[pa.Table]:
        """See :class:`Reader`."""
        for table in self.reader.tables(columns, skip, **options):
            recoded = [
                _recode(column, self.categories[name]) if name in self.categories else column
                for name, column in zip(table.column_names, table.columns, strict=True)
            ]
            yield table.from_arrays(recoded, names=table.column_names)

    def schema(self) -> pa.Schema:
        """See :class:`Reader`."""
        schema = self.reader.schema()
        for number, field in enumerate(schema):
            if field.name in self.categories:
                kind = _recoded_type(field.type, self.categories[field.name])
                schema = schema.set(number, field.with_type(kind))
        return schema


def _recode(column: pa.ChunkedArray, categories: pa.Array) -> pa.ChunkedArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    def chunk_of(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
        if chunk.dictionary.equals(categories):
            codes = chunk.indices.cast("int32")
        else:
            codes = pc.index_in(chunk.dictionary.cast(categories.type), categories).take(chunk.indices)
        return pa.DictionaryArray.from_arrays(codes, categories, ordered=chunk.type.ordered)

    return pa.chunked_array([chunk_of(chunk) for chunk in column.chunks], _recoded_type(column.type, categories))


def _recoded_type(kind: pa.DictionaryType, categories: pa.Array) -> pa.DataType:
    import pyarrow as pa

    return pa.dictionary(pa.int32(), categories.type, ordered=kind.ordered)


def _union(name: str, categories: pa.Array | None, new: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if categories is None:
        return pa.array(new.to_pylist(), new.type)  # drops the validity bitmap, which XGBoost does not accept
    try:
        missing = new.filter(pc.invert(pc.is_in(new.cast(categories.type), categories)))
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"[DT-732] column {name!r}: expected categories of one type in all datasets, got {categories.type} and "
            f"{new.type}. Convert the categories to one type"
        ) from error
    if not len(missing):
        return categories
    return pa.array([*categories.to_pylist(), *missing.cast(categories.type).to_pylist()], categories.type)
