"""A run with nested metrics, in every file, page and command that shows metrics or accepts their names."""

import csv
import json
import pathlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import Checkpoint, CheckpointConfig, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain_console import ProgressCallback, main
from tests.console.test_page import data_of
from tests.support import DEADLINE_S

ACCURACIES = [0.5, 0.75, 0.25, 0.875]
STOP_AT = 0.8
BEST, LAST = "checkpoint_000002", "checkpoint_000003"
NAMES = {"loss", "eval/accuracy", "eval/by_class/cat"}

Command = Callable[..., str]


def train(config: dict[str, Any]) -> None:
    rank = drivetrain.get_context().get_world_rank()
    for step, accuracy in enumerate(config["accuracies"]):
        metrics = {"loss": 1.0 - accuracy, "eval": {"accuracy": accuracy, "by_class": {"cat": accuracy / 2}}}
        if rank == 0 and step < 3:
            with tempfile.TemporaryDirectory() as directory:
                pathlib.Path(directory, "step").write_text(str(step))
                drivetrain.report(metrics, Checkpoint.from_directory(directory))
        else:
            drivetrain.report(metrics)


def train_until_stopped(config: dict[str, Any]) -> None:
    train(config)
    threading.Event().wait(DEADLINE_S)
    raise TimeoutError("the stop condition was not met")


def fit(place: Path, function: Callable[[dict[str, Any]], None] = train, **options: Any) -> Result:
    return DataParallelTrainer(
        function,
        train_loop_config={"accuracies": ACCURACIES},
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=place, verbose=0, **options),
    ).fit()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Two runs on two workers; the first one retains a checkpoint by a nested metric."""
    place = tmp_path_factory.mktemp("nested")
    retention = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/accuracy")
    return [fit(place, name="scored", checkpoint_config=retention), fit(place, name="plain")]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


def test_result_and_its_files_keep_the_nested_form(results: list[Result]) -> None:
    assert results[0].metrics["eval"] == {"accuracy": 0.875, "by_class": {"cat": 0.4375}}
    first = json.loads(Path(results[0].path, "result.json").read_text().splitlines()[0])
    assert first["eval"]["by_class"] == {"cat": 0.25}
    assert results[0].best_checkpoints[0][1]["eval"]["accuracy"] == 0.75


def test_run_is_stopped_by_a_nested_metric(tmp_path: Path) -> None:
    result = fit(tmp_path, train_until_stopped, name="stopped", stop={"eval/accuracy": STOP_AT})
    assert result.metrics["eval"]["accuracy"] == ACCURACIES[-1]


def test_checkpoints_are_kept_and_chosen_by_a_nested_metric(results: list[Result]) -> None:
    assert [Path(checkpoint.path).name for checkpoint, _ in results[0].best_checkpoints] == [BEST, LAST]
    best = results[1].get_best_checkpoint("eval/accuracy")
    assert best is not None
    assert Path(best.path).name == BEST
    assert results[1].get_best_checkpoint("eval/missing") is None


def test_csv_file_and_data_frame_have_a_column_for_each_nested_metric(results: list[Result]) -> None:
    with Path(results[1].path, "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {name for name in rows[0] if not name.startswith("_")} == NAMES
    assert [float(row["eval/accuracy"]) for row in rows] == ACCURACIES
    assert list(results[1].metrics_dataframe["eval/accuracy"]) == ACCURACIES


def test_page_has_charts_and_figures_of_nested_metrics(results: list[Result], tmp_path: Path) -> None:
    results[0].write_report(tmp_path / "page.html")
    data = data_of((tmp_path / "page.html").read_text())

    curves = {(curve["rank"], curve["metric"]): curve["mean"] for curve in data["curves"]}
    assert curves[0, "eval/accuracy"] == ACCURACIES
    assert {(rank, name) for rank in (0, 1) for name in NAMES} <= curves.keys()
    assert data["metrics"]["eval/accuracy"] == 0.875
    assert [one["metrics"]["eval/by_class/cat"] for one in data["checkpoints"]] == [0.375, 0.125]


def test_figure_plots_a_nested_metric(results: list[Result]) -> None:
    pytest.importorskip("matplotlib")
    (axis,) = results[1].plot("eval/accuracy", ranks=[1]).axes
    assert list(axis.lines[0].get_ydata()) == ACCURACIES


def test_commands_show_nested_metrics_and_accept_their_names(
    results: list[Result], command: Command, tmp_path: Path
) -> None:
    scored, plain = (result.path for result in results)

    assert "eval/accuracy" in command("runs", "list", Path(scored).parent)
    assert "eval/accuracy 0.875" in command("runs", "show", scored)
    assert "eval/accuracy" in command("runs", "plot", scored, "--metric", "eval/accuracy").splitlines()[0]
    assert list(json.loads(command("runs", "plot", scored, "--metric", "eval/accuracy", "--json"))) == ["eval/accuracy"]
    compared = command("runs", "compare", scored, plain, "--metric", "eval/accuracy")
    assert [line.split() for line in compared.splitlines() if line.startswith("eval/accuracy, last")] == [
        ["eval/accuracy,", "last", "0.875", "0.875"]
    ]
    assert "\neval/accuracy\n" in compared, "the title of the plot"
    assert "eval/accuracy 0.875" in command("runs", "tail", scored, "--no-follow")
    assert "eval/accuracy 0.75" in command("checkpoints", "list", scored)
    exported = command(
        *("checkpoints", "export", plain, "best", tmp_path / "best", "--metric", "eval/accuracy", "--mode", "max")
    )
    assert exported.startswith(f"exported {BEST} ")


def test_progress_shows_nested_metrics_and_counts_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def count() -> None:
        for step in range(1, 5):
            drivetrain.report({"train": {"step": step}, "eval": {"accuracy": step / 8}})

    progress = ProgressCallback(total={"train/step": 4})
    DataParallelTrainer(
        count,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[progress], verbose=2),
    ).fit()
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].endswith(" | report 4 | train/step 4 | eval/accuracy 0.5")
