"""TensorBoard event files, including those of a run that resumes after a failure."""

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import drivetrain
from drivetrain import Callback, Checkpoint, DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_track import TBXLoggerCallback
from tests.events import read_events

REPORTS = 5


def report_steps() -> None:
    rank = drivetrain.get_context().get_world_rank()
    for step in range(REPORTS):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"{rank}.txt").write_text(str(step))
            checkpoint = Checkpoint(directory) if step == 2 else None
            drivetrain.report({"loss": step + rank / 10, "eval": {"score": 2 * step}}, checkpoint=checkpoint)


def fit(
    tmp_path: Path, *callbacks: Callback | str, workers: int = 0, train: Any = report_steps, **options: Any
) -> Result:
    run_config = RunConfig(**{"name": "run", "storage_path": tmp_path, "callbacks": callbacks, "verbose": 0, **options})
    return DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=workers), run_config=run_config).fit()


def fail_once_after_a_checkpoint() -> None:
    """Commit step 3, report up to step 5, and fail; the second attempt resumes with step 4."""
    start = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "step.txt").read_text())
    for step in range(start + 1, 8):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step.txt").write_text(str(step))
            attempt = drivetrain.get_context().attempt
            metrics = {"step": step, "attempt": attempt}
            drivetrain.report(metrics, checkpoint=Checkpoint(directory) if step == 3 else None)
        if step == 5 and not start:
            raise ArithmeticError


def test_tracker_can_be_pickled_during_and_after_a_run(tmp_path: Path) -> None:
    pickled = []

    class Pickles(Callback):
        def on_report(self, run: Any, report: Any) -> None:
            pickled.append(pickle.dumps(tensorboard))

    tensorboard = TBXLoggerCallback(ranks="all")
    fit(tmp_path, tensorboard, Pickles())
    assert all(pickle.loads(data).ranks == "all" for data in [*pickled, pickle.dumps(tensorboard)])


@pytest.mark.parametrize("ranks", ["rank0", "reduced"])
def test_resumed_run_has_each_step_once_in_json_csv_and_tensorboard(ranks: Any, tmp_path: Path) -> None:
    tensorboard = TBXLoggerCallback(ranks=ranks)
    fit(tmp_path, tensorboard, train=fail_once_after_a_checkpoint, failure_config=FailureConfig(max_failures=1))
    run = tmp_path / "run"

    steps = [json.loads(line)["step"] for line in (run / "result.json").read_text().splitlines()]
    assert steps == list(range(1, 8))
    assert len((run / "progress.csv").read_text().splitlines()) == 8
    assert scalars(run, "attempt") == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 1)]


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a scalar that TensorBoard shows."""
    return [(event.step, event.value) for event in read_events(run).Scalars(name)]


def test_tensorboard_has_scalars_histograms_images_and_hyperparameters(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        import numpy as np
        from PIL import Image

        files = Path(drivetrain.get_context().get_trial_dir())
        for step in range(3):
            Image.new("RGB", (4, 3), (80 * step, 0, 0)).save(files / f"samples_{10 * step:06}.png")
            np.savez(files / f"layers_{step}.npz", first=np.arange(10.0), second=np.ones(3))
            drivetrain.report({"loss": 1 / (step + 1), "gradients": [0.5, step]})
        (files / "broken.png").write_bytes(b"not an image")

    DataParallelTrainer(
        train,
        train_loop_config={"lr": 0.1, "optimizer": {"name": "adam"}, "layers": [3, 4]},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[TBXLoggerCallback()], verbose=0),
    ).fit()

    events = read_events(tmp_path / "run")
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert [(image.step, image.width, image.height) for image in events.Images("samples")] == [
        (0, 4, 3),
        (10, 4, 3),
        (20, 4, 3),
    ]
    assert [histogram.step for histogram in events.Histograms("gradients")] == [1, 2, 3]
    assert [histogram.histogram_value.num for histogram in events.Histograms("layers/first")] == [10, 10, 10]
    start = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["optimizer/name"].string_value == "adam"
    assert hparams["layers"].string_value == "[3, 4]"
