"""The conformance kit with the package's provider, with a minimal provider that passes, and with broken ones."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from drivetrain.plugin import DatasetProvider
from drivetrain.testing import DatasetConformance
from drivetrain_data._provider import TableDatasets
from tests.data import providers


def columns(rows: int) -> dict[str, Any]:
    return {"id": np.arange(rows), "group": np.arange(rows) // 10}


class TestFiles(DatasetConformance):
    provider = TableDatasets

    def make_dataset(self, directory: Path, rows: int) -> Any:
        pyarrow.parquet.write_table(pa.table(columns(rows)), directory / "rows.parquet", row_group_size=10)
        return directory / "rows.parquet"


class TestTables(DatasetConformance):
    provider = TableDatasets

    def make_dataset(self, directory: Path, rows: int) -> Any:
        return columns(rows)


class TestHuggingFace(DatasetConformance):
    provider = TableDatasets

    def make_dataset(self, directory: Path, rows: int) -> Any:
        datasets = pytest.importorskip("datasets")
        return datasets.Dataset.from_dict(columns(rows))


class TestNumbers(DatasetConformance):
    provider = providers.NumberDatasets

    def make_dataset(self, directory: Path, rows: int) -> Any:
        return providers.Numbers(rows)


BROKEN = {
    providers.AcceptsAnything: ["test_accepts_its_own_datasets_only"],
    providers.AcceptsNothing: ["test_accepts_its_own_datasets_only"],
    providers.ImportsALibrary: ["test_accepts_imports_nothing_else"],
    providers.OverlappingShards: ["test_every_row_is_in_one_shard"],
    providers.LosesRows: ["test_every_row_is_in_one_shard"],
    providers.OneShardForAll: ["test_every_row_is_in_one_shard", "test_all_ranks_get_the_same_number_of_batches"],
    providers.AlwaysSplits: ["test_every_rank_gets_all_rows_of_a_dataset_that_is_not_split"],
    providers.UnevenShards: ["test_all_ranks_get_the_same_number_of_batches"],
    providers.OneEpoch: ["test_each_iteration_is_an_epoch"],
    providers.IgnoresGroups: ["test_rows_that_are_kept_together_are_on_one_rank"],
    providers.ForgetsItsPosition: ["test_epoch_continues_at_a_position"],
}


@pytest.mark.parametrize(
    ("provider", "test"), [(provider, test) for provider, tests in BROKEN.items() for test in tests]
)
def test_broken_provider_is_rejected(provider: type[DatasetProvider], test: str, tmp_path: Path) -> None:
    def make_dataset(self: object, directory: Path, rows: int) -> Any:
        return providers.Numbers(rows)

    kit = type("TestBroken", (DatasetConformance,), {"provider": provider, "make_dataset": make_dataset})
    arguments: dict[str, Any] = {} if "imports" in test else {"tmp_path": tmp_path}
    if "position" in test:
        arguments["world_size"] = 2
    with pytest.raises(AssertionError):
        getattr(kit(), test)(**arguments)


def test_each_test_of_the_kit_has_a_provider_that_fails_it() -> None:
    tests = {name for name in vars(DatasetConformance) if name.startswith("test_")}
    assert tests == set(itertools.chain.from_iterable(BROKEN.values()))


def test_class_without_a_provider_is_rejected() -> None:
    with pytest.raises(TypeError, match="expected an attribute `provider`"):
        type("TestNothing", (DatasetConformance,), {})
