"""The interactive trainer: runs, results, callbacks, and the lifetime of its workers."""

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import Callback, CheckpointError, ConfigurationError, RunConfig, SessionError, TrainingFailedError
from drivetrain_interactive import (
    CheckpointStrategy,
    Trainer,
    TrainingCallback,
    load_checkpoint,
    local_rank,
    save_checkpoint,
    world_rank,
    world_size,
)
from tests.support import open_pipe, read_lines, release, wait_for_release, wait_until_exited


@pytest.fixture(params=[0, 2], ids=["inprocess", "local"])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Return a function that makes trainers whose workers exit when the test ends."""
    made: list[Trainer] = []

    def make_one(workers: int = 2, **options: Any) -> Trainer:
        runtime = "local" if workers else "inprocess"
        made.append(Trainer("none", workers, runtime=runtime, **{"logdir": tmp_path / "logs", **options}))
        return made[-1]

    yield make_one
    for trainer in made:
        trainer.shutdown()


def test_run_returns_the_value_of_every_rank(make: Callable[..., Trainer], workers: int) -> None:
    trainer = make(workers)

    def train(config: dict) -> tuple:
        return (
            world_rank(),
            local_rank(),
            world_size(),
            config["add"],
        )

    size = max(1, workers)
    assert trainer.run(train, config={"add": 2}) == [(rank, rank, size, 2) for rank in range(size)]
    assert trainer.run(lambda: None) == [None] * size


def test_next_run_starts_from_a_given_checkpoint(make: Callable[..., Trainer], workers: int) -> None:
    trainer = make(workers)

    def train(config: dict) -> int:
        checkpoint = load_checkpoint() or {"model": 0, "epoch": -1}
        model = checkpoint["model"]
        for epoch in range(checkpoint["epoch"] + 1, config["epochs"]):
            model += epoch
            save_checkpoint(epoch=epoch, model=model)
        return checkpoint["epoch"]

    assert trainer.run(train, {"epochs": 5})[0] == -1
    assert trainer.latest_checkpoint == {"epoch": 4, "model": 10}
    assert trainer.best_checkpoint_path == trainer.logdir / "run_001" / "checkpoint_000005"

    assert trainer.run(train, {"epochs": 6}, checkpoint=trainer.best_checkpoint_path)[0] == 4
    assert trainer.latest_checkpoint == {"epoch": 5, "model": 15}

    assert trainer.run(train, {"epochs": 5}, checkpoint={"epoch": 2, "model": 3})[0] == 2
    assert trainer.latest_checkpoint == {"epoch": 4, "model": 10}
    assert sorted(path.name for path in trainer.logdir.iterdir()) == ["run_001", "run_002", "run_003"]


def test_iterator_yields_the_results_of_all_ranks_and_then_their_return_values(
    make: Callable[..., Trainer], workers: int
) -> None:
    trainer = make(workers)

    def train() -> int:
        for step in range(40):
            drivetrain.report(step=step)
        return world_rank()

    ranks = range(max(1, workers))
    iterator = trainer.run_iterator(train)

    assert [[result["step"] for result in results] for results in iterator] == [
        [step for _ in ranks] for step in range(40)
    ]
    assert iterator.is_finished()
    assert iterator.get_final_results() == list(ranks)


def test_dataset_is_split_among_the_ranks(make: Callable[..., Trainer], workers: int) -> None:
    trainer = make(workers)

    pytest.importorskip("numpy")

    def rows(config: dict) -> list:
        import numpy as np

        shard = drivetrain.get_dataset_shard(config.get("name"))
        return sorted(int(x) for batch in shard.iter_batches(batch_size=4) for x in np.asarray(batch["x"]))

    def data() -> Any:
        import numpy as np

        return {"x": np.arange(8)}

    for config, dataset in (({}, data), ({"name": "mine"}, {"mine": data})):
        parts = trainer.run(rows, config, dataset=dataset)
        assert sorted(row for part in parts for row in part) == list(range(8))


def test_checkpoint_is_not_an_iteration(make: Callable[..., Trainer]) -> None:
    def train() -> None:
        for epoch in range(3):
            save_checkpoint(epoch=epoch, weights=[0.5])
            drivetrain.report(epoch=epoch)

    trainer = make()
    trainer.run(train)

    directory = Path(trainer.latest_run_dir)
    for file in ("result.json", "result_rank_1.json"):
        lines = read_lines(directory / file)
        assert [(line["epoch"], line["_training_iteration"]) for line in lines] == [(0, 1), (1, 2), (2, 3)]
    assert [entry.name for entry in directory.glob("checkpoint_*")]
    assert trainer.latest_checkpoint == {"epoch": 2, "weights": [0.5]}


def test_strategy_keeps_the_best_and_the_latest(make: Callable[..., Trainer]) -> None:
    def train() -> None:
        for loss in (2, 4, 1, 3):
            save_checkpoint(loss=loss, model={"weight": loss})

    trainer = make()
    trainer.run(train, checkpoint_strategy=CheckpointStrategy(2, "loss", "min"))

    kept = sorted(path.name for path in Path(trainer.latest_checkpoint_dir).glob("checkpoint_*"))
    assert kept == ["checkpoint_000001", "checkpoint_000003", "checkpoint_000004"]
    assert trainer.best_checkpoint_path == Path(trainer.latest_checkpoint_dir, "checkpoint_000003")
    assert trainer.latest_checkpoint == {"loss": 3, "model": {"weight": 3}}


def test_strategy_that_keeps_no_checkpoints_leaves_none_on_disk(make: Callable[..., Trainer]) -> None:
    def train(config: dict) -> None:
        save_checkpoint(epoch=7)
        if config["fails"]:
            raise ValueError("on purpose")

    trainer = make()
    for fails in (False, True):
        try:
            trainer.run(train, {"fails": fails}, checkpoint_strategy=CheckpointStrategy(num_to_keep=0))
        except TrainingFailedError:
            assert fails
        else:
            assert trainer.latest_checkpoint == {"epoch": 7}
        assert not [*Path(trainer.latest_run_dir).glob("checkpoint_*")]
        assert trainer.best_checkpoint_path is None


def test_checkpoint_that_not_all_ranks_have_saved_is_deleted_as_well(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    def train(config: dict) -> None:
        if world_rank() == 0:
            save_checkpoint(epoch=7)
            release(config["saved"])
            return
        wait_for_release(config["saved"])
        raise ValueError("on purpose")

    trainer = make()
    with open_pipe(tmp_path / "saved") as saved, pytest.raises(TrainingFailedError, match="on purpose"):
        trainer.run(train, {"saved": saved.path}, checkpoint_strategy=CheckpointStrategy(num_to_keep=0))

    assert not [*Path(trainer.latest_run_dir).glob("checkpoint_*")]


def test_checkpoint_of_another_format_is_named_in_the_error(make: Callable[..., Trainer], tmp_path: Path) -> None:
    def train() -> None:
        drivetrain.report({}, checkpoint=drivetrain.Checkpoint(tmp_path / "files"))
        load_checkpoint()

    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "weights").write_text("1")
    trainer = make(0)

    with pytest.raises(TrainingFailedError, match=r"load_checkpoint\(\): expected a checkpoint of save_checkpoint\(\)"):
        trainer.run(train)
    with pytest.raises(CheckpointError, match=r"Use latest_result\.checkpoint"):
        _ = trainer.latest_checkpoint
    assert trainer.latest_result.checkpoint.path == str(trainer.best_checkpoint_path)


class Recorder(TrainingCallback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self.calls.append((logdir, config))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        self.calls.append([result["value"] for result in results])

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self.calls.append(error)


def test_callback_gets_the_reports_of_all_ranks_side_by_side(make: Callable[..., Trainer]) -> None:
    def train(config: dict) -> None:
        rank = world_rank()
        for step in range(3 + rank):
            drivetrain.report(value=10 * step + rank)
        if config["fails"]:
            raise ValueError("on purpose")

    trainer, recorder = make(), Recorder()
    config = {"fails": False}
    trainer.run(train, config, callbacks=[recorder])
    assert recorder.calls == [(str(trainer.latest_run_dir), config), [0, 1], [10, 11], [20, 21], [31], False]

    with pytest.raises(TrainingFailedError):
        trainer.run(train, {"fails": True}, callbacks=[recorder])
    assert recorder.calls[-1] is True


def test_loop_that_ends_early_ends_the_run(make: Callable[..., Trainer]) -> None:
    class Pids(Callback):
        def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
            pids.extend(worker.pid for worker in workers)

    def endless() -> None:
        while True:
            drivetrain.report(pid=os.getpid())

    pids: list[int] = []
    trainer = make(run_config=RunConfig(verbose=0, callbacks=[Pids()]))
    for results in trainer.run_iterator(endless):
        assert [result["pid"] for result in results] == pids
        break
    wait_until_exited(pids)

    iterator = trainer.run_iterator(endless)
    next(iterator)
    with pytest.raises(SessionError, match="force=True"):
        iterator.get_final_results()
    assert trainer.run(lambda: 5) == [5, 5]
    assert iterator.is_finished()
    wait_until_exited(pids[2:4])


def test_failure_is_raised_from_the_loop(make: Callable[..., Trainer]) -> None:
    def train() -> None:
        drivetrain.report(step=1)
        raise ValueError("on purpose")

    with pytest.raises(TrainingFailedError, match="on purpose"):
        assert [[result["step"] for result in results] for results in make(0).run_iterator(train)] == [[1]]


def test_workers_start_every_run_in_a_clean_state(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple:
        return os.getpid(), os.getcwd(), os.environ.get("DRIVETRAIN_TEST_MOOD")

    def only_pids(values: list) -> list:
        return [value[0] for value in values]

    trainer = make()
    first = trainer.run(look)
    monkeypatch.setenv("DRIVETRAIN_TEST_MOOD", "calm")
    second = trainer.run(look)
    monkeypatch.chdir(tmp_path)
    third = trainer.run(look)

    assert [value[1:] for value in third] == [(str(tmp_path), "calm")] * 2
    assert [value[2] for value in second] == ["calm"] * 2
    assert len({*only_pids(first), *only_pids(second), *only_pids(third)}) == 6
    assert trainer.run(look) == third


def test_unreferenced_trainer_terminates_its_workers(make: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = Trainer("none", 2, runtime="local", logdir=tmp_path)
    pids = trainer.run(os.getpid)
    del trainer
    wait_until_exited(pids)


def test_changed_module_is_reloaded_in_all_workers(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value() -> int:
        return importlib.import_module("helpers_of_mine").VALUE

    module = tmp_path / "helpers_of_mine.py"
    module.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = make(1, run_config=RunConfig(verbose=0, preload=("helpers_of_mine",)))
    assert trainer.run(value) == [1]
    module.write_text("VALUE = 22\n")
    assert trainer.run(value) == [22]


def test_trainer_is_displayed_in_a_notebook(make: Callable[..., Trainer]) -> None:
    trainer = make(0)
    assert "not started" in trainer._repr_html_()
    trainer.run(lambda: None)
    shown = trainer._repr_html_()
    assert f">{trainer.latest_run_dir}<" in shown
    assert "num_workers" in shown


def test_run_numbers_continue_in_a_directory_that_has_runs(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path))
    for number in (1, 2):
        trainer = make(0, logdir="mine")
        assert trainer.latest_run_dir is None
        assert trainer.latest_checkpoint is None
        trainer.run(lambda: None)
        assert trainer.latest_run_dir == tmp_path / "mine" / f"run_00{number}"
    assert make(0, logdir=None).logdir.parent == tmp_path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": (1, 2)}, "expected a number"),
        ({"run_config": RunConfig(name="mine")}, "without name"),
        ({"max_retries": -2}, "at least -1"),
    ],
)
def test_arguments_are_checked(make: Callable[..., Trainer], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(**options)


def test_concurrent_runs_are_refused(make: Callable[..., Trainer]) -> None:
    class Runs(Callback):
        def on_report(self, run: Any, report: Any) -> None:
            trainer.run(lambda: None)

    trainer = make(0)
    with pytest.raises(TrainingFailedError, match="expected one call at a time"):
        trainer.run(lambda: drivetrain.report(step=1), callbacks=[Runs()])


def test_metrics_are_a_mapping_or_keywords(make: Callable[..., Trainer]) -> None:
    trainer = make(0)
    trainer.run(lambda: drivetrain.report(loss=0.5))
    assert trainer.latest_result.metrics["loss"] == 0.5
    with pytest.raises(TrainingFailedError, match="got a mapping and the keywords chekpoint"):
        trainer.run(lambda: drivetrain.report({"loss": 0.5}, chekpoint="path"))
