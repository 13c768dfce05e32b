"""The conformance kit with the package's provider, with a minimal provider that passes, and with broken ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from drivetrain.plugin import DatasetProvider
from drivetrain_data._provider import TableDatasets
from drivetrain_testing import DatasetConformance
from tests.data import providers
from tests.kits.rejecting import rejection


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


class TestSomeNumbers(DatasetConformance):
    provider = providers.OmitsRows
    rows_left_out = 1

    def make_dataset(self, directory: Path, rows: int) -> Any:
        return providers.Numbers(rows)


BROKEN = [
    (providers.AcceptsAnything, "test_accepts_its_own_datasets_only", "): expected False, got True"),
    (providers.AcceptsNothing, "test_accepts_its_own_datasets_only", "expected True, got False"),
    (providers.ImportsALibrary, "test_accepts_imports_nothing_else", "calling accepts() imports numpy"),
    (providers.OverlappingShards, "test_every_row_is_in_one_shard", "rows read twice [0, 1, 2"),
    (providers.LosesRows, "test_every_row_is_in_one_shard", "rows missing [102], rows read twice []"),
    (providers.OneShardForAll, "test_every_row_is_in_one_shard", "got 1 for 2 ranks"),
    (providers.OneShardForAll, "test_all_ranks_get_the_same_number_of_batches", "got 1 for 2 ranks"),
    (
        providers.AlwaysSplits,
        "test_every_rank_gets_all_rows_of_a_dataset_that_is_not_split",
        "rank 0 of 2: rows missing [1, 3, 5, 7, 9, 11, 13, 15, 17, 19] and 41 more, rows read twice []",
    ),
    (providers.UnevenShards, "test_all_ranks_get_the_same_number_of_batches", "got [15, 0]"),
    (providers.OneEpoch, "test_each_iteration_is_an_epoch", "the second iteration on 2 ranks: rows missing [0, 1"),
    (
        providers.ContinuesAfterABreak,
        "test_an_iteration_after_a_break_starts_a_new_epoch",
        "`break`, on 2 ranks: rows missing [0, 1",
    ),
    (providers.IgnoresGroups, "test_rows_that_are_kept_together_are_on_one_rank", "expected each group on one of 3"),
    (
        providers.ForgetsItsPosition,
        "test_epoch_continues_at_a_position",
        "after load_state_dict(...) on 3 ranks: rows missing [], rows read twice [0, 1",
    ),
    (providers.SavesTheRank, "test_epoch_continues_at_a_position", "the same position on all ranks, got [{"),
    (providers.ResumesOnce, "test_epoch_continues_after_a_second_resume", "and then with a later position on 2 ranks"),
    (
        providers.SkipsInSplit,
        "test_only_load_state_dict_skips_rows",
        "without load_state_dict(), on 2 ranks: rows missin",
    ),
    (
        providers.TakesTheCurrentPosition,
        "test_take_state_returns_the_saved_position_once",
        'expected the return value of state_dict(), {"read": 14}, got {"read": 28}',
    ),
    (providers.TakesAPositionTwice, "test_take_state_returns_the_saved_position_once", "the second take_state()"),
]


@pytest.mark.parametrize(("provider", "test", "message"), BROKEN)
def test_broken_provider_is_rejected(
    request: pytest.FixtureRequest, provider: type[DatasetProvider], test: str, message: str
) -> None:
    parameters = {"world_size": 3} if "continues" in test else {}
    kit = type("Kit", (DatasetConformance,), {"provider": provider})
    rejected = rejection(request, kit, test, parameters, make_dataset=lambda directory, rows: providers.Numbers(rows))
    assert message in rejected


def test_each_test_of_the_kit_has_a_provider_that_fails_it() -> None:
    tests = {name for name in vars(DatasetConformance) if name.startswith("test_")}
    assert tests == {test for _, test, _ in BROKEN}


def test_class_without_a_provider_is_rejected() -> None:
    with pytest.raises(TypeError, match="expected an attribute `provider`"):
        type("TestNothing", (DatasetConformance,), {})
