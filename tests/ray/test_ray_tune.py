"""Trainers inside Ray Tune: reports and checkpoints reach schedulers, and no worker remains after a trial."""

import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
import drivetrain_interactive
from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    ResourceError,
    RunConfig,
    ScalingConfig,
    SerializationError,
    TrainingFailedError,
)
from tests.support import DEADLINE_S, SEATS, Pipe, wait_until_exited
from tests.tune.jobs import REPORTS, climb, read_state, wait_until

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def quiet(ray_address: str) -> None:
    """Silence Tune, which logs the traceback of every failed trial."""
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


def trainer(workers: int = 1, **scaling: Any) -> DataParallelTrainer:
    return DataParallelTrainer(climb, scaling_config=ScalingConfig(num_workers=workers, **scaling))


def fit(trainable: Any, space: dict[str, Any], directory: Path, **options: Any) -> Any:
    from ray import tune

    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(metric="score", mode="max", **options),
        run_config=tune.RunConfig(name="search", storage_path=str(directory), verbose=0),
    ).fit()


def test_grid_search_with_two_workers_per_trial(tmp_path: Path) -> None:
    from ray import tune

    def train(config: dict[str, Any]) -> None:
        context = drivetrain.get_context()
        Path(context.get_trial_dir(), f"note_{context.get_world_rank()}").touch()
        assert context.get_world_size() == 2
        climb(config)
        drivetrain.report(
            {
                "score": 100 * config["x"],
                "names": [context.get_experiment_name(), context.get_trial_name(), context.get_trial_id()],
                "directory": context.get_trial_dir(),
            }
        )

    tuned = DataParallelTrainer(train, train_loop_config={"reports": 2, "x": 0})
    space = {"train_loop_config": {"x": tune.grid_search([3, 2])}, "scaling_config": {"num_workers": 2}}
    grid = fit(tuned.as_trainable(), space, tmp_path)

    best = grid.get_best_result()
    assert [result.metrics["score"] for result in grid] == [300, 200]
    assert [len(result.metrics_dataframe) for result in grid] == [3, 3]
    assert read_state(best.checkpoint) == (2, 6)
    assert best.metrics["names"][0] == "search"
    assert best.metrics["names"][2] == best.metrics["trial_id"]
    assert best.metrics["names"][1].endswith(best.metrics["trial_id"])
    assert Path(best.metrics["directory"]).is_relative_to(best.path)
    assert {file.name for file in Path(best.metrics["directory"]).iterdir()} == {"note_0", "note_1"}
    assert not list(Path(best.path, "run_000").glob("checkpoint_*")), "Tune has its own copies"
    assert DataParallelTrainer.restore(Path(best.path, "run_000"), climb).given["scaling_config"].num_workers == 2


@pytest.mark.parametrize(
    ("runtime", "xs", "options"),
    [
        # Workers are processes of the trials' actors, so that twenty trials take only seconds.
        pytest.param("local", [n / 20 for n in reversed(range(20))], {"reuse_actors": True}, id="twenty"),
        pytest.param(None, [0.9, 0.1], {"max_concurrent_trials": 1}, id="actors", marks=pytest.mark.campaign),
    ],
)
def test_asha_finds_the_best_trial_and_stopped_trials_leave_no_worker(
    tmp_path: Path, pipe: Pipe, runtime: str | None, xs: list[float], options: dict[str, Any]
) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    space = {"train_loop_config": {"x": tune.grid_search(xs), "pipe": pipe.path}}
    asha = ASHAScheduler(max_t=REPORTS, grace_period=1, reduction_factor=2)

    grid = fit(trainer(runtime=runtime).as_trainable(), space, tmp_path, scheduler=asha, **options)

    assert not grid.errors
    assert len(grid) == len(xs)
    best = grid.get_best_result()
    assert best.config["train_loop_config"]["x"] == max(xs)
    assert best.metrics["step"] == REPORTS
    assert read_state(best.checkpoint)[0] == REPORTS
    assert sum(result.metrics["step"] < REPORTS for result in grid) >= len(xs) // 4
    wait_until_exited(int(line.split()[1]) for line in pipe.receive(len(xs)))


@pytest.mark.campaign
def test_population_based_training_continues_from_the_best_checkpoints(tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    choices = [0.1, 0.2, 0.3, 0.9]
    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"train_loop_config": {"x": choices}},
        synch=True,
    )
    space = {"train_loop_config": {"x": tune.grid_search(choices)}}

    grid = fit(trainer(runtime="local").as_trainable(), space, tmp_path, scheduler=pbt, reuse_actors=True)

    assert not grid.errors
    best = grid.get_best_result()
    assert best.metrics["score"] == pytest.approx(REPORTS * 0.9)
    without_exploiting = sorted(REPORTS * x for x in choices)
    assert min(result.metrics["score"] for result in grid) > without_exploiting[0], "the worst continued from the best"
    assert any(Path(result.path, "run_001").exists() for result in grid)


def test_trials_that_need_the_whole_cluster_run_one_after_the_other(tmp_path: Path, pipe: Pipe, gate: Pipe) -> None:
    import ray
    from ray import tune

    resources = {"CPU": 0, SEATS: 1}
    tuned = trainer(trainer_resources={SEATS: 1}, resources_per_worker=resources)
    space = {
        "scaling_config": {"num_workers": tune.choice([3])},  # the cluster has 4
        "train_loop_config": {"x": 1, "reports": 1, "pipe": pipe.path, "gate": gate.path},
    }
    seats_in_use: list[int] = []

    def watch() -> None:
        for _ in range(2):
            assert len({line.split()[0] for line in pipe.receive(3, deadline_s=170)}) == 1
            wait_until(lambda: ray.available_resources().get(SEATS, 0.0) == 0)  # Ray updates it with a delay
            gate.release(3)
            seats_in_use.append(4)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    grid = fit(tuned.as_trainable(), space, tmp_path, num_samples=2)
    watcher.join(2 * DEADLINE_S)

    assert not grid.errors
    assert seats_in_use == [4, 4], "a seat for each worker, and one for the trainer"


def test_failed_trial_keeps_its_cause_and_resumes_after_restore(tmp_path: Path) -> None:
    from ray import tune

    fixed = tmp_path / "fixed"
    config = {"x": 1, "fails_after": 3, "fixed": str(fixed)}
    trainable = trainer().as_trainable()

    (result,) = fit(trainable, {"train_loop_config": config}, tmp_path)

    assert isinstance(result.error, TrainingFailedError)
    assert isinstance(result.error.cause.__cause__, ZeroDivisionError)
    assert read_state(result.checkpoint) == (3, 3)

    fixed.touch()
    (resumed,) = tune.Tuner.restore(str(tmp_path / "search"), trainable, resume_errored=True).fit()
    assert resumed.error is None
    assert resumed.metrics["score"] == REPORTS
    assert list(resumed.metrics_dataframe["step"]) == list(range(1, REPORTS + 1)), "no step was repeated"


def test_tune_run_with_a_function_of_the_interactive_trainer(tmp_path: Path) -> None:
    from ray import tune

    def train_func(config: dict[str, Any]) -> None:
        for epoch in range(config["num_epochs"]):
            drivetrain.report(output=config["input"])
            drivetrain_interactive.save_checkpoint(epoch=epoch)

    interactive = drivetrain_interactive.Trainer(
        "none", num_workers=2, runtime="local", logdir=tmp_path / "interactive"
    )
    analysis = tune.run(
        interactive.to_tune_trainable(train_func),
        config={"num_epochs": 2, "input": tune.grid_search([1, 2, 3])},
        metric="output",
        mode="max",
        storage_path=str(tmp_path),
        verbose=0,
    )

    assert analysis.get_best_config(metric="output", mode="max") == {"num_epochs": 2, "input": 3}
    with analysis.get_last_checkpoint(analysis.best_trial).as_directory() as directory:
        saved = pickle.loads(Path(directory, "dict_checkpoint.pkl").read_bytes())
    assert saved == {"epoch": 1}


@pytest.mark.filterwarnings("ignore:.*deprecated")  # raised within Ray Data
@pytest.mark.campaign
def test_search_space_over_datasets(tmp_path: Path) -> None:
    import ray.data
    from ray import tune

    def train() -> None:
        batches = drivetrain.get_dataset_shard("train").iter_batches(batch_size=None)
        drivetrain.report({"score": sum(int(batch["id"].sum()) for batch in batches)})

    tuned = DataParallelTrainer(train, datasets={"train": ray.data.range(3)})
    grids = tune.grid_search([ray.data.range(10), ray.data.range(20)])
    grid = fit(tuned.as_trainable(), {"datasets": {"train": grids}}, tmp_path, max_concurrent_trials=1)

    assert [result.metrics["score"] for result in grid] == [45, 190]


@pytest.mark.parametrize(
    ("space", "error", "message"),
    [
        ({"run_config": RunConfig(name="a")}, ConfigurationError, r"Tuner\(\.\.\., run_config=\.\.\.\)"),
        ({"lr": 1}, ConfigurationError, "train_loop_config"),
        ({"scaling_config": {"num_workers": 64}}, ResourceError, r"'CPU': 64.*got a cluster with.*autoscaling=True"),
        ({"scaling_config": {"use_gpu": True}}, ResourceError, r"'GPU': 1.*got a cluster with .*'GPU': 0"),
    ],
)
def test_invalid_search_space_is_rejected_in_the_driver(
    tmp_path: Path, space: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(trainer().as_trainable(), space, tmp_path)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_trial_that_leaves_no_cpu_for_ray_data_is_rejected(tmp_path: Path) -> None:
    import ray.data

    tuned = DataParallelTrainer(
        climb, scaling_config=ScalingConfig(num_workers=4), datasets={"train": ray.data.range(3)}
    )
    with pytest.raises(ResourceError, match="Ray Data"):
        fit(tuned.as_trainable(), {}, tmp_path)


def test_error_for_too_small_trial_resources_names_the_required_bundles(tmp_path: Path) -> None:
    from ray import tune

    trainable = tune.with_resources(trainer(2).as_trainable(), {"CPU": 1})
    (result,) = fit(trainable, {"train_loop_config": {"x": 1}}, tmp_path)
    assert "expected 2 bundles with {'CPU': 1.0} for the workers" in str(result.error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"datasets": {"train": (number for number in (1, 2))}}, r"datasets\['train'\] \(a generator\)"),
        ({"train_loop_config": {"lock": threading.Lock()}}, r"train_loop_config\['lock'\]"),
    ],
)
def test_error_names_the_argument_that_cannot_be_pickled(arguments: dict[str, Any], message: str) -> None:
    make: Callable[[], Any] = DataParallelTrainer(climb, **arguments).as_trainable
    with pytest.raises(SerializationError, match=message):
        make()


@pytest.mark.filterwarnings("ignore:The `RunConfig` class should be imported from `ray.tune`")  # the mistake itself
def test_run_config_of_drivetrain_is_refused_by_the_tuner_with_a_remedy() -> None:
    from ray import tune

    with pytest.raises(ConfigurationError, match=r"RunConfig: .* pass it ray\.tune\.RunConfig"):
        tune.Tuner(trainer().as_trainable(), run_config=drivetrain.RunConfig()).fit()
