"""Reads Hugging Face datasets: in the format that the user has set, with decoded images, in the order of the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError
from drivetrain_data._conversion import make_table
from drivetrain_data._tables import skip_rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["HuggingFaceReader"]

_TABLE_FORMATS = (None, "python", "arrow", "pandas", "polars")  # formats whose values are those of the Arrow table
_CHUNK_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class HuggingFaceReader:
    """Reads rows from a ``datasets.Dataset`` or ``datasets.IterableDataset``.

    The Arrow tables of a dataset are read directly, unless this would change its values: if the user has set a
    transform or a format that converts values (such as ``with_format("torch")``), or if features are decoded. The
    dataset then creates the batches, and they are converted to tables. The format of an ``IterableDataset`` cannot be
    determined, and is ignored.

    Attributes:
        name: the name of the dataset.
        dataset: the dataset.
        first_epoch: the epoch that the user has set for an ``IterableDataset``.
    """

    name: str
    dataset: Any
    first_epoch: int = 0

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return False

    @property
    def converts(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        features = self.dataset.features
        return self._format["type"] not in _TABLE_FORMATS or (features is not None and _is_decoded(features))

    def tables(
        self,
        columns: Sequence[str] | None = None,
        skip: int = 0,
        *,
        epoch: int = 0,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`."""
        dataset, names = self.dataset, columns
        if self._has_length:
            if skip:  # IterableDataset.skip() would also skip other ranks' rows
                dataset, skip = dataset.skip(skip), 0
            options = self._format
            if names is None and not options["output_all_columns"]:
                names = options["columns"]
            if not self.converts:
                dataset = dataset.with_format("arrow", columns=None if names is None else list(names))
            elif options["type"] in _TABLE_FORMATS:
                dataset = dataset.with_format(None, columns=None if names is None else list(names))
        else:
            if names is not None:
                dataset = dataset.select_columns(list(names))
            dataset = dataset.with_format(None if self.converts else "arrow")
            dataset.set_epoch(self.first_epoch + epoch)
        if self.converts:
            tables = self._convert(dataset, batch_rows or _CHUNK_ROWS)
        else:
            tables = dataset.iter(batch_size=_CHUNK_ROWS)
        for table in skip_rows(tables, skip):
            yield table if columns is None else table.select(columns)

    def _convert(self, dataset: Any, batch_rows: int) -> Iterator[pa.Table]:
        types = self._plain_types()
        unread = len(dataset) if self._has_length else None
        for batch in dataset.iter(batch_size=batch_rows):
            table = make_table(self.name, batch, types)
            if unread is not None:
                if table.num_rows != min(batch_rows, unread):
                    raise ConfigurationError(
                        f"[DT-743] dataset {self.name!r}: expected a transform that returns as many rows as it gets, "
                        f"got {table.num_rows} rows for {min(batch_rows, unread)}. Change the number of rows with "
                        "dataset.map() instead"
                    )
                unread -= table.num_rows
            yield table

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`. If the dataset converts its rows, read one row to determine them."""
        features = self.dataset.features
        if self.converts or features is None:
            import pyarrow as pa

            first = next(self.tables(batch_rows=1), None)
            return pa.schema([]) if first is None else first.schema
        names = [field.name for field in features.arrow_schema]
        if not self._format["output_all_columns"]:
            names = [name for name in names if name in (self._format["columns"] or names)]
        import pyarrow as pa

        return pa.schema([features.arrow_schema.field(name) for name in names], features.arrow_schema.metadata)

    @property
    def _has_length(self) -> bool:
        return hasattr(self.dataset, "__len__")

    @property
    def _format(self) -> Mapping[str, Any]:
        if self._has_length:
            options: Mapping[str, Any] = self.dataset.format
            return options
        return {"type": None, "columns": None, "output_all_columns": True}

    def _plain_types(self) -> dict[str, pa.DataType]:
        """Return the types of the columns whose values a batch contains unchanged."""
        features = self.dataset.features
        if self._format["type"] not in _TABLE_FORMATS or features is None:
            return {}
        return {field.name: field.type for field in features.arrow_schema if not _is_decoded(features[field.name])}


def _is_decoded(feature: Any) -> bool:
    """Return True if a feature is decoded when it is read, such as an image, or contains such a feature."""
    if isinstance(feature, Mapping):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, (list, tuple)):
        return any(map(_is_decoded, feature))
    if hasattr(feature, "decode_example"):
        return bool(getattr(feature, "decode", True))
    return hasattr(feature, "feature") and _is_decoded(feature.feature)
