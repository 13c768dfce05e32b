"""Notebook representations and plots."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain import Checkpoint, DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from tests.console.conftest import train_with_accidents


def test_result_shows_its_directory_and_outcome(story: Result) -> None:
    shown = story._repr_html_()
    assert "Result" in shown
    assert story.path in shown
    assert "checkpoint_" in shown
    assert "&lt;b&gt;bold" in shown
    assert "<b>bold" not in shown


def test_checkpoint_shows_its_files_and_metrics_or_that_it_is_empty(story: Result, tmp_path: Path) -> None:
    assert story.checkpoint is not None
    shown = story.checkpoint._repr_html_()
    assert "2, 60,0" in shown
    assert "metrics: loss" in shown
    assert "does not exist" in Checkpoint(tmp_path / "nothing")._repr_html_()


def test_configs_show_differences_from_the_defaults_and_no_credentials() -> None:
    shown = RunConfig(name="x", storage_path="s3://key:secret@bucket/runs?secret_key=abc")._repr_html_()
    assert "storage_path" in shown
    assert "start_timeout_s" not in shown
    assert "secret@" not in shown
    assert "abc" not in shown
    assert "max_failures" in FailureConfig(max_failures=3)._repr_html_()


def test_trainer_shows_its_function_and_configs() -> None:
    trainer = DataParallelTrainer(train_with_accidents, scaling_config=ScalingConfig(num_workers=3))
    shown = trainer._repr_html_()
    for words in ("train_with_accidents", "ScalingConfig", "num_workers", "RunConfig", "NoBackend"):
        assert words in shown


def test_dataframe_has_a_row_for_each_report(story: Result) -> None:
    pandas = pytest.importorskip("pandas")
    frame = story.metrics_dataframe
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["step"]) == list(range(1, 61))


def test_plot_has_a_panel_for_each_metric_and_a_line_for_each_rank(story: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = story.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["step", "loss"]
    assert [line.get_label() for line in figure.axes[1].lines] == ["rank 0", "rank 1"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(story.plot("loss", ranks=[1], log=True).axes[0].lines) == 1
    with pytest.raises(ValueError, match=r"got 'lss'\. Known metrics: step, loss"):
        story.plot("lss")


def test_missing_package_is_named_with_its_install_command(story: Result) -> None:
    code = (
        "import sys; sys.modules['pandas'] = sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "import drivetrain; result = drivetrain.Result.from_path(sys.argv[1])\n"
        "for look in (lambda: result.metrics_dataframe, lambda: result.plot()):\n"
        "    try: look()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, story.path], capture_output=True, text=True, check=True).stdout
    assert "pip install pandas" in shown
    assert 'pip install "drivetrain[plot]"' in shown
