"""Searches on this machine: they find the best trial, stop others early, and leave no worker behind."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

import drivetrain
import drivetrain_tune as tune
from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    ResourceError,
    RunConfig,
    RunExistsError,
    ScalingConfig,
    SerializationError,
    StorageError,
    TrainingFailedError,
)
from tests.support import DEADLINE_S, Driver, Pipe, wait_until_exited
from tests.tune.jobs import REPORTS, climb, read_state, wait_until

CPUS = len(os.sched_getaffinity(0))
BEST = {"metric": "score", "mode": "max"}


def search(
    directory: Path,
    config: dict[str, Any],
    tune_config: dict[str, Any] | None = None,
    *,
    workers: int = 1,
    scaling: dict[str, Any] | None = None,
    **run_config: Any,
) -> tune.Tuner:
    return tune.Tuner(
        DataParallelTrainer(climb, scaling_config=ScalingConfig(num_workers=workers, runtime="local")),
        param_space={"train_loop_config": config, **({"scaling_config": scaling} if scaling else {})},
        tune_config=tune.TuneConfig(**{**BEST, **(tune_config or {})}),
        run_config=RunConfig(**{"name": "search", "storage_path": directory, "verbose": 0, **run_config}),
    )


def states(grid: tune.ResultGrid) -> list[str]:
    return [result.state for result in grid]


@contextlib.contextmanager
def running(tuner: tune.Tuner) -> Iterator[None]:
    """Run a search on a thread for the duration of a ``with`` block."""
    grids: list[tune.ResultGrid] = []
    thread = threading.Thread(target=lambda: grids.append(tuner.fit()), daemon=True)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert grids


def pids_by_trial(pipe: Pipe, count: int) -> dict[str, int]:
    return {name: int(pid) for name, pid in (line.split() for line in pipe.receive(count))}


def test_search_with_a_scheduler_finds_the_best_trial_and_prunes_others(tmp_path: Path, pipe: Pipe) -> None:
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    sampler = optuna.samplers.TPESampler(seed=0)

    grid = search(
        tmp_path,
        {"x": tune.uniform(0, 1), "pipe": pipe.path},
        {"num_samples": 20, "scheduler": pruner, "search_alg": sampler},
    ).fit()

    best = grid.get_best_result()
    assert len(grid) == grid.num_terminated == 20
    assert best.config["train_loop_config"]["x"] == max(result.config["train_loop_config"]["x"] for result in grid)
    assert best.state == "completed" or best.metrics["step"] == REPORTS
    assert read_state(best.checkpoint) == (REPORTS, pytest.approx(best.metrics["score"]))
    early = [result for result in grid if result.metrics["step"] < REPORTS]
    assert len(early) >= 5
    assert {result.state for result in early} == {"pruned"}
    assert [trial.params["train_loop_config/x"] for trial in grid.study.trials] == [
        result.config["train_loop_config"]["x"] for result in grid
    ]
    wait_until_exited(pids_by_trial(pipe, 20).values())


def test_data_frame_has_a_row_for_each_trial_of_a_grid(tmp_path: Path) -> None:
    grid = search(tmp_path, {"x": tune.grid_search([1, 3, 2]), "reports": 1}, {"num_samples": 2}).fit()

    table = grid.get_dataframe()
    assert list(table["config/train_loop_config/x"]) == list(table["score"]) == [1, 3, 2, 1, 3, 2]
    assert list(table["trial"]) == [f"trial_{number:05d}" for number in range(6)]
    assert all(Path(path, "run.json").exists() for path in table["path"])
    assert grid.get_best_result(mode="min").config["train_loop_config"]["x"] == 1


@dataclass(frozen=True)
class Options:
    x: int = 0
    steps: int = 2


def report_steps(options: Options) -> None:
    for step in range(options.steps):
        drivetrain.report(score=options.x + step)


def test_trials_change_single_fields_of_a_dataclass(tmp_path: Path) -> None:
    scaling = ScalingConfig(num_workers=1, runtime="local")
    grid = tune.Tuner(
        DataParallelTrainer(report_steps, train_loop_config=Options(steps=3), scaling_config=scaling),
        param_space={"train_loop_config": {"x": tune.grid_search([1, 5])}},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=RunConfig(name="search", storage_path=tmp_path, verbose=0),
    ).fit()
    assert [result.metrics["score"] for result in grid] == [3, 7]
    assert grid.get_best_result().config["train_loop_config"] == {"x": 5}


def test_search_with_a_train_function_instead_of_a_trainer(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        context = drivetrain.get_context()
        names = [context.get_experiment_name(), context.get_trial_name(), context.get_trial_id()]
        drivetrain.report({"loss": (config["x"] - 2) ** 2, "names": names, "directory": context.get_trial_dir()})

    grid = tune.Tuner(
        train,
        param_space={"x": tune.choice([1, 2, 3])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=3),
        run_config=RunConfig(name="mine", storage_path=tmp_path, verbose=0),
    ).fit()

    assert [result.metrics["loss"] for result in grid] == [(result.config["x"] - 2) ** 2 for result in grid]
    assert [result.metrics["names"] for result in grid] == [
        ["mine", f"trial_{number:05d}", f"mine_{number:05d}"] for number in range(3)
    ]
    assert len({result.metrics["directory"] for result in grid}) == 3


@pytest.mark.skipif(CPUS < 2, reason="requires two CPUs")
def test_number_of_concurrent_trials_depends_on_their_cpus(tmp_path: Path, pipe: Pipe, gate: Pipe) -> None:
    half = {"resources_per_worker": {"CPU": CPUS / 2}}
    concurrent = search(
        tmp_path,
        {"x": 1, "pipe": pipe.path, "gate": gate.path, "reports": 1},
        {"num_samples": 3},
        scaling=half,
        name="concurrent",
    )
    with running(concurrent):
        both = pids_by_trial(pipe, 2)
        assert set(both) == {"trial_00000", "trial_00001"}
        gate.release(1)
        assert set(pids_by_trial(pipe, 1)) == {"trial_00002"}, "it starts when another trial has ended"
        gate.release(2)

    sequential = search(
        tmp_path,
        {"x": 1, "pipe": pipe.path, "reports": 1},
        {"num_samples": 3},
        workers=2 * CPUS,
        name="sequential",
    )
    assert states(sequential.fit()) == ["completed"] * 3
    assert [line.split()[0] for line in pipe.receive(6 * CPUS)] == [
        f"trial_{number:05d}" for number in range(3) for _ in range(2 * CPUS)
    ], "a trial that requires more CPUs than the machine has runs alone"


def test_number_of_concurrent_trials_can_be_limited(tmp_path: Path, pipe: Pipe) -> None:
    grid = search(
        tmp_path,
        {"x": 1, "pipe": pipe.path, "reports": 3},
        {"num_samples": 3, "max_concurrent_trials": 1},
        scaling={"resources_per_worker": {"CPU": 0.1}},
    ).fit()
    assert list(pids_by_trial(pipe, 3)) == [result.name for result in grid]


def test_failed_trial_keeps_its_cause_and_does_not_stop_the_others(tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"

    def fails_after(config: dict[str, Any]) -> int | None:
        return 3 if config["train_loop_config"]["x"] == 2 else None

    grid = search(
        tmp_path, {"x": tune.grid_search([1, 2]), "fails_after": tune.sample_from(fails_after), "fixed": str(fixed)}
    ).fit()

    assert states(grid) == ["completed", "failed"]
    (error,) = grid.errors
    assert isinstance(error, TrainingFailedError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert grid.get_best_result().config["train_loop_config"]["x"] == 1, "3 reports with x=2 score less than 8 with x=1"

    restored = tune.Tuner.restore(tmp_path / "search", DataParallelTrainer(climb))
    (error,) = restored.get_results().errors
    assert "ZeroDivisionError" in str(error)

    fixed.touch()
    resumed = tune.Tuner.restore(tmp_path / "search", DataParallelTrainer(climb), resume_errored=True).fit()
    assert states(resumed) == ["completed", "completed"]
    assert [report["step"] for report in _reports(resumed[1])] == list(range(1, REPORTS + 1)), "it resumed"


def _reports(result: tune.TrialResult) -> list[dict[str, Any]]:
    return result.metrics_dataframe.to_dict("records")


SEARCH = """
import json, sys
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig
import drivetrain_tune as tune
from tests.tune.jobs import climb

given = json.loads(sys.argv[1])
if __name__ == "__main__":
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.1}, runtime="local")
    tuner = tune.Tuner(
        DataParallelTrainer(climb, scaling_config=scaling),
        param_space={"train_loop_config": {**given["config"], "x": tune.grid_search([1, 2, 3])}},
        tune_config=tune.TuneConfig(metric="score", mode="max", max_concurrent_trials=2),
        run_config=RunConfig(name="search", storage_path=given["storage_path"], verbose=0),
    )
    tuner.fit()
"""


@pytest.mark.parametrize("signal", ["interrupt", "kill"])
def test_search_resumes_after_its_driver_was_interrupted_or_killed(
    tmp_path: Path, pipe: Pipe, gate: Pipe, signal: str
) -> None:
    config = {"pipe": pipe.path, "gate": gate.path, "waits_after": 3}
    driver = Driver(tmp_path, SEARCH, {"config": config, "storage_path": str(tmp_path)}, {})
    try:
        pids = pids_by_trial(pipe, 2)
        manifests = [tmp_path / "search" / name / "manifest.json" for name in pids]
        wait_until(lambda: all(file.exists() and "checkpoint_000003" in file.read_text() for file in manifests))
        getattr(driver, signal)()
        code, _, errors = driver.wait()
        assert code != 0
        assert signal == "kill" or "KeyboardInterrupt" in errors
        wait_until_exited(pids.values())
        driver.wait_until_nothing_is_left()
    finally:
        driver.clean_up()

    gate.release(3)
    assert tune.Tuner.can_restore(tmp_path / "search")
    grid = tune.Tuner.restore(tmp_path / "search", DataParallelTrainer(climb)).fit()

    assert states(grid) == ["completed"] * 3
    assert [report["step"] for report in _reports(grid[0])] == list(range(1, REPORTS + 1))
    assert grid.get_best_result().config["train_loop_config"]["x"] == 3


def test_trials_that_run_at_the_end_of_the_time_budget_are_stopped(tmp_path: Path, pipe: Pipe, gate: Pipe) -> None:
    grid = search(
        tmp_path,
        {"x": 1, "pipe": pipe.path, "gate": gate.path, "waits_after": 2},
        {"num_samples": 3, "max_concurrent_trials": 1, "time_budget_s": 20},
    ).fit()

    assert states(grid) == ["stopped"]
    assert grid[0].metrics["step"] == 2
    wait_until_exited(pids_by_trial(pipe, 1).values())


def test_stop_condition_of_the_run_config_applies_to_every_trial(tmp_path: Path) -> None:
    grid = search(tmp_path, {"x": tune.grid_search([1, 4])}, stop={"score": 8}).fit()
    assert [result.metrics["score"] for result in grid] == [8, 8]
    assert states(grid) == ["completed", "completed"]


def test_nested_metric_ranks_stops_and_lists_trials(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for step in range(1, 4):
            drivetrain.report({"eval": {"score": step * config["x"]}})

    grid = tune.Tuner(
        DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0)),
        param_space={"train_loop_config": {"x": tune.grid_search([1, 4])}},
        tune_config=tune.TuneConfig(metric="eval/score", mode="max"),
        run_config=RunConfig(name="search", storage_path=tmp_path, verbose=0, stop={"eval/score": 8}),
    ).fit()
    assert list(grid.get_dataframe()["eval/score"]) == [3, 8]
    assert grid.get_best_result().config["train_loop_config"]["x"] == 4


def test_columns_with_equal_names_are_kept_apart(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        drivetrain.report({"state": 1, "path": 2, "config": {"x": 3}, "score": 4})

    grid = tune.Tuner(
        train,
        param_space={"x": tune.grid_search([5])},
        tune_config=tune.TuneConfig(**BEST),
        run_config=RunConfig(name="search", storage_path=tmp_path, verbose=0),
    ).fit()
    (row,) = grid.get_dataframe().to_dict("records")
    assert (row["state"], row["path"], row["config/x"]) == ("completed", grid[0].path, 5)
    assert (row["metrics/state"], row["metrics/path"], row["metrics/config/x"], row["score"]) == (1, 2, 3, 4)


def test_second_fit_of_a_tuner_is_a_new_search(tmp_path: Path) -> None:
    tuner = search(tmp_path, {"x": 1, "reports": 1}, name=None)
    first, second = tuner.fit(), tuner.fit()
    assert first.experiment_path != second.experiment_path
    assert second[0].metrics["score"] == 1


def test_error_for_a_metric_that_is_not_reported_lists_the_reported_ones(tmp_path: Path) -> None:
    grid = search(tmp_path, {"x": 1, "reports": 1}, {"metric": "skore"}).fit()
    (error,) = grid.errors
    assert "'skore'" in str(error)
    assert "(score, step)" in str(error)
    with pytest.raises(RuntimeError, match="got none in 1 trials with 1 errors"):
        grid.get_best_result()


def test_trials_can_run_in_this_process_one_after_the_other(tmp_path: Path) -> None:
    grid = search(
        tmp_path, {"x": tune.grid_search([1, 2]), "reports": 1}, scaling={"num_workers": 0, "runtime": None}
    ).fit()
    assert [result.metrics["score"] for result in grid] == [1, 2]


def test_trainer_continues_the_training_of_the_best_trial(tmp_path: Path) -> None:
    best = search(tmp_path, {"x": 1, "reports": 2}).fit().get_best_result()

    trainer = DataParallelTrainer.restore(best.path, train_loop_config={"x": 1, "reports": 4})

    assert trainer.fit().metrics["step"] == 4


def test_existing_search_is_not_overwritten(tmp_path: Path) -> None:
    search(tmp_path, {"x": 1, "reports": 1}).fit()
    with pytest.raises(RunExistsError, match=r"Tuner\.restore"):
        search(tmp_path, {"x": 1, "reports": 1}).fit()
    with pytest.raises(StorageError, match=r"tuner\.json"):
        tune.Tuner.restore(tmp_path, DataParallelTrainer(climb))
    with pytest.raises(
        ConfigurationError, match=r"expected the search space of the search in .*, got one with domains \['metadata'\]"
    ):
        tune.Tuner.restore(tmp_path / "search", DataParallelTrainer(climb), param_space={"metadata": tune.choice([1])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": ""}, "name of a metric"),
        ({"mode": "best"}, "'max' or 'min'"),
        ({"num_samples": 0}, "expected an integer >= 1"),
        ({"max_concurrent_trials": 1.5}, "expected an integer >= 1"),
        ({"time_budget_s": 0}, "positive number of seconds"),
        ({"scheduler": "asha"}, "pruner of optuna.pruners.*as_trainable"),
        ({"search_alg": object()}, "sampler of optuna.samplers"),
    ],
)
def test_invalid_tune_config_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tune.TuneConfig(**{**BEST, **options})


def test_space_with_shared_arguments_is_rejected() -> None:
    space = {"run_config": RunConfig(name="other")}
    with pytest.raises(ConfigurationError, match=r"Tuner\(\.\.\., run_config=\.\.\.\)"):
        tune.Tuner(DataParallelTrainer(climb), param_space=space, tune_config=tune.TuneConfig(**BEST))


def test_search_ends_if_no_trial_can_start(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="GPUs"):
        search(tmp_path, {"x": 1}, scaling={"use_gpu": True, "resources_per_worker": {"GPU": 64}}).fit()
    with pytest.raises(SerializationError, match=r"train_loop_config\['x'\]"):
        search(tmp_path, {"x": (number for number in (1, 2))}, name="other").fit()


def test_importing_the_package_imports_neither_optuna_nor_ray() -> None:
    code = "import drivetrain_tune, sys; assert not {'optuna', 'ray', 'numpy', 'pandas'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
