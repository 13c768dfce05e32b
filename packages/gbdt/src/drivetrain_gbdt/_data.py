"""The datasets for training on tables: splits them, and checks their columns and labels before the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, DataConfig
from drivetrain.plugin.datasets import OpenedDataset
from drivetrain_gbdt._labels import LabelRules, Labels

if TYPE_CHECKING:
    import pyarrow as pa

    from drivetrain_data import Categories, Source, TableShard

__all__ = ["TRAIN", "Columns", "TableData", "no_rows"]

TRAIN = "train"

_MAX_CHECKED_LABELS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The roles of the columns of the datasets.

    Attributes:
        label: the column to predict.
        others: a mapping from the dataset's name to further columns that are not features, such as weights.
        categorical: True if features may be categorical.
        any_category: True if categories may be of any type; False if they must be text or integers.
    """

    label: str
    others: Mapping[str, Sequence[str]]
    categorical: bool
    any_category: bool = True

    def features(self, name: str, schema: pa.Schema, expected: Sequence[str] | None = None) -> list[str]:
        """Check the columns of a dataset, and return the names of its features.

        Args:
            name: the name of the dataset.
            schema: the schema of the dataset.
            expected: the features of the training dataset; None for the training dataset itself.

        Raises:
            ConfigurationError: a column is missing, or has a type that the library cannot train on; or the dataset has
                other features than the training dataset.
        """
        from pyarrow import types

        columns: list[str] = list(schema.names)
        not_features = (self.label, *self.others.get(name, ()))
        for column in not_features:
            if column not in columns:
                raise ConfigurationError(
                    f"[DT-732] dataset {name!r}: expected a column {column!r}, got {', '.join(map(repr, columns))}"
                )
            kind = schema.field(column).type
            if not _is_numeric(kind) and column == self.label:
                raise ConfigurationError(
                    f"[DT-732] dataset {name!r}: expected numeric labels, got column {column!r} of type {kind}. "
                    "Encode it as numbers"
                )
        features = [column for column in columns if column not in not_features]
        accepted = "numeric or categorical" if self.categorical else "numeric"
        for column in features:
            kind = schema.field(column).type
            if types.is_dictionary(kind) and self.categorical:
                values = kind.value_type
                if not self.any_category and not types.is_integer(values) and not _is_text(values):
                    raise ConfigurationError(
                        f"[DT-732] dataset {name!r}: expected categories that are text or integers, got column "
                        f"{column!r} with categories of type {values}. Convert the categories to text"
                    )
            elif not _is_numeric(kind):
                raise ConfigurationError(
                    f"[DT-732] dataset {name!r}: expected {accepted} features, "
                    f"got column {column!r} of type {kind}. Encode it as numbers, or drop it"
                )
        if expected is not None and set(features) != set(expected):
            raise ConfigurationError(
                f"[DT-732] dataset {name!r}: expected the same features as in {TRAIN!r}, got different ones: "
                f"{', '.join(sorted(set(features) ^ set(expected)))}"
            )
        return features


class TableData(DataConfig):
    """Splits tables, rejects tables that cannot be trained on, and gives categories the same codes in all shards.

    Args:
        columns: the roles of the columns.
        objective: the name of the objective; None if the objective is a function or the library's default.
        classes: the number of classes; None if the objective has none.
        groups: for each dataset, a column; rows with the same value in this column stay on one worker.
        datasets_to_split: see :class:`drivetrain.DataConfig`.
        execution_options: see :class:`drivetrain.DataConfig`.
    """

    def __init__(
        self,
        *,
        columns: Columns,
        objective: str | None,
        classes: int | None,
        groups: Mapping[str, str],
        datasets_to_split: str | Sequence[str],
        execution_options: Any | None,
    ) -> None:
        super().__init__(datasets_to_split, execution_options, keep_together=groups)
        self._columns = columns
        self._objective = objective
        self._classes = classes
        self._categories: Categories | None = None  # None until a table is opened
        self._expected: list[str] | None = None

    def open(self, datasets: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :meth:`drivetrain.DataConfig.open`; also checks the columns and labels of the opened datasets."""
        opened = super().open(datasets)
        self._check(opened)
        return opened

    def configure(
        self, datasets: Mapping[str, Any], world_size: int, *args: Any, **options: Any
    ) -> list[dict[str, Any]]:
        """See :meth:`drivetrain.DataConfig.configure`; also checks the datasets that functions return."""
        created = {name: dataset() if callable(dataset) else dataset for name, dataset in datasets.items()}
        opened = super().open(created)
        self._check({name: dataset for name, dataset in opened.items() if dataset is not created[name]})
        return [
            {name: self._recoded(shard) for name, shard in shards.items()}
            for shards in super().configure(opened, world_size, *args, **options)
        ]

    def _check(self, opened: Mapping[str, Any]) -> None:
        """Check the columns and labels of the datasets that were opened as tables, and collect their categories.

        Functions, and datasets that another provider splits, are not checked.
        """
        sources = _sources(opened)
        if not sources:
            return
        from drivetrain_data import Categories

        self._categories = self._categories or Categories()
        names = sorted(sources, key=lambda name: name != TRAIN)  # the categories of "train" come first
        for name in names:
            features = self._columns.features(name, sources[name].schema(), self._expected)
            self._expected = features if name == TRAIN else self._expected
        for name, shard in DataConfig().configure({name: opened[name] for name in names}, 1)[0].items():
            if shard.rows == 0:
                raise no_rows(name)
            self._check_labels(name, shard)
            self._categories.add(shard)

    def _check_labels(self, name: str, shard: TableShard) -> None:
        rules = LabelRules.of(self._objective, self._classes)
        if rules is None or not 0 < (shard.rows or 0) <= _MAX_CHECKED_LABELS:
            return
        labels = Labels.read(name, self._columns.label, shard)
        rules.check_domain(labels)
        if name == TRAIN:
            rules.check_differences(labels)

    def _recoded(self, shard: Any) -> Any:
        if self._categories is None:
            return shard
        from drivetrain_data import TableShard

        return self._categories.recode(shard) if isinstance(shard, TableShard) else shard


def no_rows(name: str) -> ConfigurationError:
    """Return the error for a dataset without rows."""
    return ConfigurationError(
        f"[DT-732] dataset {name!r}: expected at least one row, got none. Check the filter or the files from which the "
        "dataset is made, or leave the dataset out"
    )


def _sources(opened: Mapping[str, Any]) -> dict[str, Source]:
    """Return the datasets that were opened as tables."""
    values = {name: dataset.value for name, dataset in opened.items() if isinstance(dataset, OpenedDataset)}
    if not values:
        return {}
    try:
        from drivetrain_data import Source
    except ModuleNotFoundError:  # then other providers have opened all datasets
        return {}
    return {name: value for name, value in values.items() if isinstance(value, Source)}


def _is_text(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_numeric(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))
