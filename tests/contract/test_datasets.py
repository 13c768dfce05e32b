"""The datasets of a trainer, as its workers see them."""

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    ConfigurationError,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    ResourceError,
    Result,
    RunConfig,
    ScalingConfig,
    SessionError,
    TrainingFailedError,
)
from drivetrain._runtimes.local import LocalRuntime
from drivetrain.plugin import WorkerInfo
from drivetrain.plugin.datasets import SplitRequest
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import same_on_ray, with_processes

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


def test_each_worker_gets_its_own_rows_and_all_rows_of_unsplit_datasets(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    result = runtime.fit(
        count_rows, {}, datasets=datasets(tmp_path), dataset_config=DataConfig(datasets_to_split=["train"])
    )
    assert (result.metrics["sum"], result.metrics["rows"], result.metrics["valid"]) == (sum(range(ROWS)), ROWS, 13)
    assert (result.metrics["first"] > 0) == (runtime.world() > 1)


@same_on_ray
@with_processes
def test_datasets_are_split_again_for_the_next_attempt(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    result = runtime.fit(
        count_rows, {"dies": 1}, datasets=datasets(tmp_path), failure_config=FailureConfig(max_failures=1)
    )
    assert (result.metrics["rows"], result.metrics["sum"]) == (ROWS, sum(range(ROWS)))


@same_on_ray
def test_unknown_dataset_name_is_refused_with_the_available_names(runtime: RuntimeUnderTest) -> None:
    def ask(config: dict[str, Any]) -> None:
        drivetrain.get_dataset_shard(config["name"])

    with pytest.raises(TrainingFailedError, match="got 'test'; the run has 'train'") as failed:
        runtime.fit(ask, {"name": "test"}, datasets={"train": {"x": [1, 2]}})
    assert isinstance(failed.value.__cause__, SessionError)
    with pytest.raises(TrainingFailedError, match=r"the run has no datasets\. Pass datasets="):
        runtime.fit(ask, {"name": None}, name="without")


def test_single_dataset_needs_no_name_and_a_custom_config_makes_the_shards(runtime: RuntimeUnderTest) -> None:
    class Letters(DataConfig):
        def configure(self, datasets: Any, world_size: int, *args: Any, **options: Any) -> list[dict[str, Any]]:
            return [{"train": datasets["train"] * (rank + 1)} for rank in range(world_size)]

    def train() -> None:
        drivetrain.report({"length": len(drivetrain.get_dataset_shard())}, reduce={"length": "sum"})

    result = runtime.fit(train, datasets={"train": "abc"}, dataset_config=Letters())
    assert result.metrics["length"] == sum(3 * (rank + 1) for rank in range(runtime.world()))


def test_dataset_that_cannot_be_opened_is_refused_before_the_start(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="files that can be opened"):
        runtime.fit(count_rows, {}, datasets={"train": str(tmp_path / "nothing.parquet")})
    assert not (runtime.storage_path / "run").exists()


def test_shards_are_only_available_in_train_functions() -> None:
    with pytest.raises(SessionError, match="get_dataset_shard"):
        drivetrain.get_dataset_shard("train")


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # Ray Data triggers these warnings itself
def test_ray_datasets_are_streamed_to_their_workers(ray_address: str, tmp_path: Path) -> None:
    import ray.data

    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    given = {"train": ray.data.range(100), "valid": ray.data.range(13).materialize()}
    trainer = DataParallelTrainer(
        count_rows,
        train_loop_config={},
        datasets=given,
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=tmp_path, name="run", verbose=0),
    )
    result = trainer.fit()
    assert (result.metrics["rows"], result.metrics["sum"], result.metrics["valid"]) == (100, sum(range(100)), 13)

    with pytest.raises(
        ConfigurationError, match=r"dataset 'train': expected a runtime .* \('ray', 'inprocess'\), got 'local'"
    ):
        DataParallelTrainer(
            count_rows,
            datasets=given,
            scaling_config=ScalingConfig(num_workers=2, runtime="local"),
            run_config=RunConfig(storage_path=tmp_path, name="local", verbose=0),
        ).fit()


@pytest.mark.ray
def test_ray_object_references_reach_the_workers(ray_address: str, tmp_path: Path) -> None:
    import ray

    captured = ray.put(2)

    def train(config: dict[str, Any]) -> int:
        import ray

        return int(ray.get(config["rows"]).sum()) + ray.get(captured)

    result = drivetrain.DataParallelTrainer(
        train,
        train_loop_config={"rows": ray.put(np.arange(5))},
        scaling_config=drivetrain.ScalingConfig(num_workers=2),
        run_config=drivetrain.RunConfig(storage_path=tmp_path, name="run", verbose=0),
    ).fit()
    assert result.return_value == 10 + 2


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # Ray Data triggers these warnings itself
@pytest.mark.campaign
def test_no_cpu_left_to_read_a_ray_dataset_is_an_error(ray_address: str, tmp_path: Path) -> None:
    import ray.data

    def fit(**datasets: Any) -> Result:
        return DataParallelTrainer(
            count_rows,
            datasets=datasets,
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}),
            run_config=RunConfig(storage_path=tmp_path, verbose=0),
        ).fit()

    rows = ray.data.range(100)
    with pytest.raises(ResourceError, match=r"got 4 CPUs in the cluster, of which the run takes 4\. Use fewer workers"):
        fit(train=rows, valid={"id": np.arange(13)})
    result = fit(train=rows.materialize(), valid={"id": np.arange(13)})
    assert result.metrics["rows"] == 100


def read_twice(config: dict[str, Any]) -> None:
    shard = drivetrain.get_dataset_shard("train")
    epochs = [[row for batch in shard.iter_batches() for row in batch["id"].tolist()] for _ in range(2)]
    draws = [[row for batch in shard.iter_batches() for row in batch["draw"].tolist()] for _ in range(2)]
    drivetrain.report(
        {
            "rows": len(epochs[0]),
            "sum": sum(epochs[0]),
            "in_order": int(all(rows == sorted(rows) for rows in epochs)),
            "drawn_anew": int(draws[0] != draws[1]),
        },
        reduce={"rows": "sum", "sum": "sum", "in_order": "min", "drawn_anew": "min"},
    )


def make_ray_dataset() -> Any:
    import ray.data

    def draw(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "draw": np.random.default_rng().random(len(batch["id"]))}

    return ray.data.range(100).map_batches(draw)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.campaign
def test_ray_dataset_made_by_a_function_is_transformed_again_in_each_epoch(ray_address: str, tmp_path: Path) -> None:
    from ray.data import ExecutionOptions

    result = DataParallelTrainer(
        read_twice,
        datasets={"train": make_ray_dataset},
        dataset_config=DataConfig(execution_options=ExecutionOptions(preserve_order=True)),
        scaling_config=ScalingConfig(num_workers=2, runtime="ray", resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    ).fit()
    found = {name: result.metrics[name] for name in ("rows", "sum", "in_order", "drawn_anew")}
    assert found == {"rows": 100, "sum": sum(range(100)), "in_order": 1, "drawn_anew": 1}


def train_on_scaled(config: dict[str, Any]) -> None:
    import torch

    rows = torch.cat([batch["x"] for batch in drivetrain.get_dataset_shard("train").iter_torch_batches()])
    with tempfile.TemporaryDirectory() as directory:
        torch.save(rows.mean(), Path(directory, "mean.pt"))
        drivetrain.report(
            {"rows": len(rows), "sum": rows.sum().item(), "width": rows.shape[1]},
            Checkpoint.from_directory(directory) if drivetrain.get_context().get_world_rank() == 0 else None,
            reduce={"rows": "sum", "sum": "sum"},
        )


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.campaign
def test_preprocessor_is_fitted_applied_and_stored_in_the_checkpoint(ray_address: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import ray.data
    from ray.data.preprocessors import Chain, Concatenator, StandardScaler
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame[:568]  # Ray drops rows that cannot be split evenly
    scaled = Chain(
        StandardScaler(columns=["mean radius", "mean area"]),
        Concatenator(columns=["mean radius", "mean area"], output_column_name="x", dtype=np.float32),
    )
    dataset = ray.data.from_pandas(frame[["mean radius", "mean area", "target"]])
    result = DataParallelTrainer(
        train_on_scaled,
        datasets={"train": scaled.fit_transform(dataset)},
        metadata={"preprocessor": scaled.serialize()},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    ).fit()

    assert (result.metrics["rows"], result.metrics["width"]) == (len(frame), 2)
    assert abs(result.metrics["sum"]) < 1e-2
    assert result.checkpoint is not None
    again = Chain.deserialize(result.checkpoint.get_metadata()["preprocessor"])
    batch = again.transform_batch(frame[["mean radius", "mean area"]])
    assert abs(np.stack(batch["x"]).mean()) < 1e-5


class Shrinking(LocalRuntime):
    """This machine, with room for one worker fewer after each failure."""

    def __init__(self, space: int) -> None:
        self.space = space

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.space


class Shrinks(Callback):
    """Reduces the room, and records the sizes that follow."""

    def __init__(self, machine: Shrinking) -> None:
        self.machine = machine
        self.sizes: list[int] = []

    def on_group_start(self, run: Any, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self.sizes.append(len(workers))

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        self.machine.space -= 1


def note_rows(config: dict[str, Any]) -> None:
    """Train two epochs; each rank saves its rows with each step, and rank 0 also the position in the dataset."""
    context = drivetrain.get_context()
    shard, epoch = drivetrain.get_dataset_shard("train"), 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        epoch = checkpoint.get_metadata()["epoch"]
        shard.load_state_dict(checkpoint.get_metadata()["data"])
    first, steps = epoch, 0
    for epoch in range(first, 2):
        for batch in shard.iter_batches(batch_size=30_000):
            steps += 1
            if steps == 3 and context.attempt < 3 and context.get_world_rank() == context.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with tempfile.TemporaryDirectory() as directory:
                np.save(Path(directory, f"seen_{context.get_world_rank()}.npy"), batch["id"])
                saved = Checkpoint.from_directory(directory)
                if context.get_world_rank() == 0:
                    saved.set_metadata({"epoch": epoch, "data": shard.state_dict()})
                drivetrain.report({"epoch": epoch}, saved)


def test_no_row_of_a_million_is_lost_or_repeated_while_workers_are_lost(tmp_path: Path) -> None:
    rows = 1_000_003
    pyarrow.parquet.write_table(pa.table({"id": np.arange(rows)}), tmp_path / "rows.parquet", row_group_size=70_000)
    machine = Shrinking(4)
    shrinks = Shrinks(machine)
    result = DataParallelTrainer(
        note_rows,
        datasets={"train": str(tmp_path / "rows.parquet")},
        scaling_config=ScalingConfig(num_workers=(1, 4), runtime=machine),
        run_config=RunConfig(
            storage_path=tmp_path / "runs",
            verbose=0,
            callbacks=[shrinks],
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()

    assert shrinks.sizes == [4, 3, 2, 1]
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for checkpoint, metrics in result.best_checkpoints:
        files = [file for file in sorted(Path(checkpoint.path).iterdir()) if file.suffix == ".npy"]
        seen[metrics["epoch"]] += [np.load(file) for file in files]
    for parts in seen.values():
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


def read_on_device(config: dict[str, Any]) -> None:
    import torch

    import drivetrain_torch

    # No GPU is available to the tests, so another device takes its place.
    drivetrain_torch.get_device = lambda: torch.device("meta")
    shard = drivetrain.get_dataset_shard("train")
    by_default = {batch["id"].device.type for batch in shard.iter_torch_batches()}
    by_default |= {batch["id"].device.type for batch in drivetrain.get_dataset_shard("valid").iter_torch_batches()}
    chosen = {batch["id"].device.type for batch in shard.iter_torch_batches(device="cpu")}
    drivetrain.report(by_default=",".join(by_default), chosen=",".join(chosen))


class OwnSplit(DataConfig):
    """Splits Ray datasets as in the documentation of Ray Train."""

    def configure(
        self, datasets: Any, world_size: int, worker_handles: Any = None, worker_node_ids: Any = None, **options: Any
    ) -> list[dict[str, Any]]:
        train = datasets["train"].streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
        valid = datasets["valid"].iterator()
        return [{"train": shard, "valid": valid} for shard in train]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(DataConfig(datasets_to_split=["train"]), id="default"),
        pytest.param(OwnSplit(), id="own", marks=pytest.mark.campaign),
    ],
)
def test_torch_batches_of_ray_datasets_are_on_the_device_of_the_worker(
    config: DataConfig, ray_address: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    import ray.data

    result = DataParallelTrainer(
        read_on_device,
        datasets={"train": ray.data.range(20), "valid": ray.data.range(4).materialize()},
        dataset_config=config,
        scaling_config=ScalingConfig(num_workers=2, runtime="ray", resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    ).fit()
    assert (result.metrics["by_default"], result.metrics["chosen"]) == ("meta", "cpu")


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_execution_options_of_a_ray_dataset_are_kept(ray_address: str) -> None:
    import ray.data
    from ray.data import DataContext, ExecutionOptions, ExecutionResources

    from drivetrain_ray import RayDatasets

    provider = RayDatasets()

    def options_of_shard(dataset: Any, options: Any = None) -> Any:
        request = SplitRequest(name="train", world_size=2, whole=True, resources={"CPU": 1}, options=options)
        return provider.split(dataset, request)[0].get_context().execution_options

    dataset = ray.data.range(10)
    dataset.context.execution_options.preserve_order = True
    options = options_of_shard(dataset)
    assert (options.preserve_order, options.resource_limits.cpu) == (True, 3)
    assert dataset.context.execution_options.preserve_order
    assert dataset.context.execution_options.is_resource_limits_default()
    assert not DataContext.get_current().execution_options.preserve_order

    assert not options_of_shard(dataset, ExecutionOptions()).preserve_order
    dataset.context.execution_options.resource_limits = ExecutionResources(gpu=0, object_store_memory=1e8)
    limits = options_of_shard(dataset).resource_limits
    assert (limits.cpu, limits.gpu, limits.object_store_memory) == (3, 0, 1e8)
    dataset.context.execution_options.resource_limits = ExecutionResources(cpu=2)
    assert options_of_shard(dataset).resource_limits.cpu == 2

    context = DataContext.get_current()
    before, context.execution_options = context.execution_options, ExecutionOptions(preserve_order=True)
    try:
        assert DataConfig.default_ingest_options().preserve_order
        assert options_of_shard(ray.data.range(10)).preserve_order
    finally:
        context.execution_options = before


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_materialized_ray_datasets_with_too_few_rows_are_refused(ray_address: str) -> None:
    import ray.data

    for rows, message in ((0, "at least one row, got none"), (1, "at least one row for each of 2 workers, got 1 rows")):
        with pytest.raises(ConfigurationError, match=rf"DT-741.*'train'.*{message}"):
            DataConfig().configure({"train": ray.data.range(rows).materialize()}, 2)


def test_options_for_a_dataset_that_does_not_exist_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"execution_options=\.\.\.\): expected names of datasets \('train'\)"):
        DataConfig(execution_options={"test": object()}).open({"train": {"id": np.arange(3)}})


def save_positions(config: dict[str, Any]) -> None:
    shard = drivetrain.get_dataset_shard("train")
    for step, _ in enumerate(shard.iter_batches(batch_size=2)):
        checkpoint = drivetrain.Checkpoint(tempfile.mkdtemp(dir=config["directory"]))
        checkpoint.set_metadata({"data": shard.state_dict(), "step": step})
        rank = drivetrain.get_context().get_world_rank()
        Path(checkpoint.path, f"model_{rank}").touch()
        drivetrain.report({"step": step}, checkpoint)


def test_every_rank_may_store_the_position_of_its_dataset_in_the_metadata(tmp_path: Path) -> None:
    result = DataParallelTrainer(
        save_positions,
        train_loop_config={"directory": str(tmp_path)},
        datasets={"train": {"id": np.arange(8)}},
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path / "runs", verbose=0),
    ).fit()
    assert result.checkpoint is not None
    metadata = result.checkpoint.get_metadata()
    assert metadata["step"] == 1
    assert set(metadata) == {"step", "data", "dataset_positions"}
