import os
import threading
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Callback, CheckpointConfig, Result, TrainingFailedError
from drivetrain.plugin import Report
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import mostly_on, same_on_ray, with_processes
from tests.support import Collector, read_lines


@same_on_ray
def test_result_has_the_latest_metrics_of_rank_0_and_every_report_is_on_disk(
    runtime: RuntimeUnderTest,
) -> None:
    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(config["steps"]):
            drivetrain.report({"step": step, "rank": rank, "nested": {"values": [step, None, "text"]}})

    collector = Collector()
    result = runtime.fit(train, {"steps": 3}, callbacks=[collector])

    assert (result.metrics["step"], result.metrics["rank"]) == (2, 0)
    assert result.metrics["nested"] == {"values": [2, None, "text"]}
    assert result.error is None
    for rank in range(runtime.world()):
        file = Path(result.path, "result.json" if rank == 0 else f"result_rank_{rank}.json")
        assert [(line["step"], line["rank"]) for line in read_lines(file)] == [(0, rank), (1, rank), (2, rank)]
        assert [metrics["step"] for metrics in collector.metrics_of(rank)] == [0, 1, 2]
    assert [line.split(",")[0] for line in Path(result.path, "progress.csv").read_text().splitlines()] == [
        *("step", "0", "1", "2")
    ]
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2]
    assert Result.from_path(result.path).metrics == result.metrics


@same_on_ray
def test_train_function_without_argument_and_report_returns_its_value_and_no_metrics(
    runtime: RuntimeUnderTest,
) -> None:
    def train() -> dict:
        return {"rank": drivetrain.get_context().get_world_rank(), "set": {1, 2}}

    result = runtime.fit(train)

    assert result.return_value == {"rank": 0, "set": {1, 2}}
    assert result.metrics == {}
    assert result.checkpoint is None
    assert result.best_checkpoints == []


@same_on_ray
def test_unpicklable_return_value_causes_a_warning_and_does_not_fail_the_run(
    runtime: RuntimeUnderTest,
) -> None:
    def train() -> object:
        drivetrain.report({"done": True})
        return threading.Lock()

    result = runtime.fit(train)

    assert result.metrics["done"] is True
    if runtime.has_processes:
        assert result.return_value is None
        assert "cannot be pickled" in Path(result.path, "logs", "rank_0.log").read_text()


@same_on_ray
def test_every_report_has_its_time_and_number_and_further_details_on_request(runtime: RuntimeUnderTest) -> None:
    def train() -> int:
        drivetrain.report({"step": 0})
        drivetrain.report({"step": 1, "_timestamp": "mine"})
        return os.getpid()

    plain, detailed = Collector(), Collector()
    runtime.fit(train, name="plain", callbacks=[plain])
    result = runtime.fit(train, name="detailed", callbacks=[detailed], detailed_metrics=True)

    for rank in range(runtime.world()):
        first, second = plain.metrics_of(rank)
        assert set(first) == {"step", "_timestamp", "_time_this_iter_s", "_training_iteration"}
        assert [first["_training_iteration"], second["_training_iteration"]] == [1, 2]
        assert isinstance(first["_timestamp"], int)
        assert second["_timestamp"] == "mine"
        assert 0 <= first["_time_this_iter_s"] < 60
        first, second = detailed.metrics_of(rank)
        assert set(first) - {"step", "_timestamp", "_time_this_iter_s", "_training_iteration"} == {
            *("_date", "_hostname", "_node_ip", "_pid", "_time_total_s")
        }
        assert 0 <= first["_time_total_s"] <= second["_time_total_s"] < 60
    assert detailed.metrics_of(0)[0]["_pid"] == result.return_value


@same_on_ray
def test_numbers_in_arrays_and_tensors_of_one_element_arrive_as_plain_numbers(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        class Tensor:
            shape = (1, 1)

            def item(self) -> float:
                return 0.5

        drivetrain.report({"loss": Tensor(), "history": (1, 2), "on": True})

    metrics = runtime.fit(train).metrics

    assert (metrics["loss"], metrics["history"], metrics["on"]) == (0.5, [1, 2], True)


@same_on_ray
def test_value_that_is_not_plain_fails_the_run_with_the_name_of_its_key(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        drivetrain.report({"fine": 1, "losses": (number for number in range(3))})

    with pytest.raises(TrainingFailedError, match="losses") as failed:
        runtime.fit(train)

    assert isinstance(failed.value.__cause__, drivetrain.SessionError)


@same_on_ray
@with_processes
def test_reduced_metrics_are_combined_over_the_ranks_and_reach_the_result_in_order(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(3):
            drivetrain.report(
                {"step": step, "mean": rank + step, "sum": rank + 1, "min": rank, "max": rank, "own": rank},
                reduce={"mean": "mean", "sum": "sum", "min": "min", "max": "max"},
            )
        drivetrain.report({"step": 3, "mean": -1.0})

    collector = Collector()
    result = runtime.fit(train, workers=3, callbacks=[collector])

    reports = collector.metrics_of(0)
    assert [metrics["step"] for metrics in reports] == [0, 1, 2, 3]
    assert [metrics["mean"] for metrics in reports] == [1.0, 2.0, 3.0, -1.0]
    assert [(m["sum"], m["min"], m["max"], m["own"]) for m in reports[:3]] == [(6, 0, 2, 0)] * 3
    assert [metrics["own"] for metrics in collector.metrics_of(2)[:3]] == [2, 2, 2]
    assert result.metrics["mean"] == -1.0


@same_on_ray
@with_processes
def test_metric_is_combined_over_the_remaining_ranks(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(1 if rank == 1 else 2):
            drivetrain.report({"step": step, "loss": 10.0 * rank}, reduce={"loss": "mean"})

    collector = Collector()
    runtime.fit(train, callbacks=[collector])

    assert [metrics["loss"] for metrics in collector.metrics_of(0)] == [5.0, 0.0]


def test_context_has_ranks_sizes_names_directories_and_metadata(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        context = drivetrain.get_context()
        Path(context.get_trial_dir(), f"artifact_{context.get_world_rank()}").write_text("made here")
        drivetrain.report(
            {
                "world_size": context.get_world_size(),
                "world_rank": context.get_world_rank(),
                "local_rank": context.get_local_rank(),
                "local_world_size": context.get_local_world_size(),
                "node_rank": context.get_node_rank(),
                "experiment_name": context.get_experiment_name(),
                "trial_name": context.get_trial_name(),
                "trial_id": context.get_trial_id(),
                "trial_dir": context.get_trial_dir(),
                "metadata": context.get_metadata(),
                "resources": context.get_trial_resources(),
                "kept": context.checkpoint_config.num_to_keep,
            }
        )

    collector = Collector()
    kept = CheckpointConfig(num_to_keep=3)
    metadata = {"dataset": "digits", "classes": [0, 1]}
    result = runtime.fit(train, name="known", callbacks=[collector], metadata=metadata, checkpoint_config=kept)

    world = runtime.world()
    for rank in range(world):
        (facts,) = collector.metrics_of(rank)
        assert facts["world_size"] == facts["local_world_size"] == world
        assert facts["world_rank"] == facts["local_rank"] == rank
        assert facts["node_rank"] == 0
        assert facts["experiment_name"] == facts["trial_name"] == "known"
        assert facts["trial_id"] == collector.metrics_of(0)[0]["trial_id"]
        assert facts["metadata"] == {"dataset": "digits", "classes": [0, 1]}
        assert facts["kept"] == 3
        assert facts["resources"].get("CPU", 0) == (world if runtime.has_processes else 0)
        assert Path(facts["trial_dir"]).is_relative_to(result.path)
        assert Path(facts["trial_dir"], f"artifact_{rank}").read_text() == "made here"


@same_on_ray
@pytest.mark.parametrize("chdir", [None, False, True])
def test_working_directory_is_the_artifact_directory_on_request(
    runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch, chdir: bool | None
) -> None:
    def train() -> None:
        drivetrain.report({"cwd": os.getcwd(), "trial_dir": drivetrain.get_context().get_trial_dir()})

    monkeypatch.chdir(runtime.storage_path)
    collector = Collector()
    options = {} if chdir is None else {"chdir_to_trial_dir": chdir}
    result = runtime.fit(train, callbacks=[collector], **options)

    assert os.getcwd() == str(runtime.storage_path), "the driver's working directory changed"
    for rank in range(runtime.world()):
        (facts,) = collector.metrics_of(rank)
        assert Path(facts["trial_dir"]).is_relative_to(result.path)
        assert (facts["cwd"] == facts["trial_dir"]) is bool(chdir)


def test_rank_variables_and_thread_count_are_those_of_torchrun(
    runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def train() -> None:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
        drivetrain.report({name: os.environ.get(name) for name in names})

    collector = Collector()
    before = dict(os.environ)
    runtime.fit(train, callbacks=[collector])

    world = runtime.world()
    for rank in range(world):
        (found,) = collector.metrics_of(rank)
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == (str(world), str(world))
        assert found["GROUP_RANK"] == "0"
        if runtime.has_processes:
            assert int(found["OMP_NUM_THREADS"]) >= 1
    assert dict(os.environ) == before, "the driver's environment changed"


class _MemoryWatch(Callback):
    """Measures the resident memory of this process after a number of reports, and checks their order."""

    def __init__(self, warm_after: int) -> None:
        self.warm_after = warm_after
        self.count = 0
        self.warm_bytes = 0
        self.last_bytes = 0

    def on_report(self, run: object, report: Report) -> None:
        assert report.metrics["step"] == self.count, "a report is lost or out of order"
        self.count += 1
        if self.count == self.warm_after:
            self.warm_bytes = _resident_bytes()

    def on_run_end(self, run: object, error: object) -> None:
        self.last_bytes = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@mostly_on("local")
def test_100000_reports_arrive_in_order_and_without_memory_growth_of_the_driver(runtime: RuntimeUnderTest) -> None:
    def train(config: dict) -> None:
        for step in range(config["steps"]):
            drivetrain.report({"step": step, "loss": step / 3, "text": "text that takes memory if it is kept"})

    watch = _MemoryWatch(warm_after=20_000)
    result = runtime.fit(train, {"steps": 100_000}, workers=1, callbacks=[watch])

    assert watch.count == 100_000
    assert [line["step"] for line in read_lines(Path(result.path, "result.json"))] == list(range(100_000))
    grown = watch.last_bytes - watch.warm_bytes
    assert grown < 12 << 20, f"80,000 further reports took {grown / 1e6:.1f} MB of the driver's memory"
