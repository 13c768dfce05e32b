"""Datasets that a trainer is given, as its workers see them."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import drivetrain
from drivetrain import ConfigurationError, DataConfig, FailureConfig, SessionError, TrainingFailedError
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import with_processes

ROWS = 101


def count_rows(config: dict[str, Any]) -> None:
    context = drivetrain.get_context()
    if context.attempt == 0 and context.get_world_rank() == config.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    seen = [
        int(number)
        for batch in drivetrain.get_dataset_shard("train").iter_batches(batch_size=7)
        for number in batch["id"]
    ]
    valid = sum(len(batch["id"]) for batch in drivetrain.get_dataset_shard("valid").iter_batches())
    drivetrain.report(
        {"sum": sum(seen), "rows": len(seen), "valid": valid, "first": seen[0]},
        reduce={"sum": "sum", "rows": "sum", "valid": "min", "first": "max"},
    )


def datasets(directory: Path) -> dict[str, Any]:
    file = directory / "train.parquet"
    pyarrow.parquet.write_table(pa.table({"id": np.arange(ROWS)}), file, row_group_size=10)
    return {"train": file, "valid": {"id": np.arange(13)}}


def test_each_worker_gets_its_own_rows_and_all_of_what_is_not_split(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    result = runtime.fit(
        count_rows, {}, datasets=datasets(tmp_path), dataset_config=DataConfig(datasets_to_split=["train"])
    )
    assert result.metrics is not None
    assert (result.metrics["sum"], result.metrics["rows"], result.metrics["valid"]) == (sum(range(ROWS)), ROWS, 13)
    assert (result.metrics["first"] > 0) == (runtime.world() > 1)


@with_processes
def test_datasets_are_split_anew_for_the_next_attempt(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    result = runtime.fit(
        count_rows, {"dies": 1}, datasets=datasets(tmp_path), failure_config=FailureConfig(max_failures=1)
    )
    assert result.metrics is not None
    assert (result.metrics["rows"], result.metrics["sum"]) == (ROWS, sum(range(ROWS)))


def test_a_name_that_no_dataset_has_is_told_with_those_that_are_there(runtime: RuntimeUnderTest) -> None:
    def ask(config: dict[str, Any]) -> None:
        drivetrain.get_dataset_shard(config["name"])

    with pytest.raises(TrainingFailedError, match="found 'test'; the run has 'train'") as failed:
        runtime.fit(ask, {"name": "test"}, datasets={"train": {"x": [1, 2]}})
    assert isinstance(failed.value.__cause__, SessionError)
    with pytest.raises(TrainingFailedError, match="the run has no datasets: pass datasets="):
        runtime.fit(ask, {"name": None}, name="without")


def test_an_only_dataset_needs_no_name_and_a_config_of_ones_own_makes_the_shards(runtime: RuntimeUnderTest) -> None:
    class Letters(DataConfig):
        def configure(self, datasets: Any, world_size: int, *args: Any, **options: Any) -> list[dict[str, Any]]:
            return [{"train": datasets["train"] * (rank + 1)} for rank in range(world_size)]

    def train() -> None:
        drivetrain.report({"length": len(drivetrain.get_dataset_shard())}, reduce={"length": "sum"})

    result = runtime.fit(train, datasets={"train": "abc"}, dataset_config=Letters())
    assert result.metrics is not None
    assert result.metrics["length"] == sum(3 * (rank + 1) for rank in range(runtime.world()))


def test_dataset_that_cannot_be_opened_is_refused_before_anything_is_started(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        runtime.fit(count_rows, {}, datasets={"train": str(tmp_path / "nothing.parquet")})
    assert not (runtime.storage_path / "run").exists()


def test_shards_are_asked_for_in_train_functions_only() -> None:
    with pytest.raises(SessionError, match="get_dataset_shard"):
        drivetrain.get_dataset_shard("train")


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # Ray Data warns of what it does itself
def test_ray_datasets_are_streamed_to_their_workers(ray_address: str, tmp_path: Path) -> None:
    import ray.data

    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    given = {"train": ray.data.range(100), "valid": ray.data.range(13)}
    trainer = DataParallelTrainer(
        count_rows,
        train_loop_config={},
        datasets=given,
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=tmp_path, name="run", verbose=0),
    )
    result = trainer.fit()
    assert result.metrics is not None
    assert (result.metrics["rows"], result.metrics["sum"], result.metrics["valid"]) == (100, sum(range(100)), 13)

    with pytest.raises(ConfigurationError, match="dataset 'train' is Ray's, which wants workers on Ray"):
        DataParallelTrainer(
            count_rows,
            datasets=given,
            scaling_config=ScalingConfig(num_workers=2, runtime="local"),
            run_config=RunConfig(storage_path=tmp_path, name="local", verbose=0),
        ).fit()
