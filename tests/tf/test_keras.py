"""``Model.fit`` of Keras 2 on two workers, and of Keras 3 on one worker."""

from collections.abc import Callable

import numpy as np
import pytest

from drivetrain import Result, TrainingFailedError
from drivetrain_tf.keras import ReportCheckpointCallback
from tests.support import Collector
from tests.tf import jobs

Fit = Callable[..., Result]


@pytest.mark.campaign
def test_keras_2_with_a_killed_worker_has_the_losses_of_an_undisturbed_run(fit: Fit):
    collectors = Collector(), Collector()
    undisturbed, killed = (
        fit(jobs.fit_digits, {"epochs": 5, **death}, max_failures=len(death), run={"callbacks": [collector]})
        for death, collector in zip(({}, {"die_in_epoch": 3}), collectors, strict=True)
    )
    assert undisturbed.return_value >= 0.95
    losses, losses_of_killed = ([metrics["loss"] for metrics in collector.metrics_of(0)] for collector in collectors)
    assert collectors[1].attempts == 2
    assert losses_of_killed == pytest.approx(losses, rel=1e-6)
    assert killed.return_value == pytest.approx(undisturbed.return_value)


def test_models_loaded_from_all_formats_continue_with_the_same_losses(fit: Fit):
    losses = fit(jobs.losses_after_each_format).return_value
    assert len(losses) == 4
    for name, values in losses.items():
        assert values == pytest.approx(losses["undisturbed"], rel=1e-6), name


def test_callback_reports_selected_metrics_on_selected_events(fit: Fit):
    collector = Collector()
    fit(
        jobs.fit_with_callback,
        {
            "keras": "tf_keras",
            "make": lambda: ReportCheckpointCallback(
                checkpoint_on="train_end",
                report_metrics_on=["epoch_end", "train_batch_end"],
                metrics={"error": "loss"},
                filename="model.weights.h5",
            ),
        },
        workers=1,
        run={"callbacks": [collector]},
    )
    reports = collector.metrics_of(0)
    assert len(reports) == 2 * (jobs.STEPS + 1) + 1
    assert all(isinstance(metrics["error"], float) and "loss" not in metrics for metrics in reports)
    assert collector.checkpoints == [f"checkpoint_{len(reports):06d}"]


@pytest.mark.parametrize("replicas", [0, pytest.param(2, marks=pytest.mark.campaign)])
def test_keras_3_fits_on_one_worker_with_all_of_its_devices(fit: Fit, replicas: int):
    result = fit(
        jobs.fit_with_callback,
        {"keras": "keras", "replicas": replicas, "make": ReportCheckpointCallback},
        workers=1,
    )
    assert result.return_value == (replicas or 1)
    assert result.metrics["accuracy"] > 0.8
    assert result.checkpoint is not None


def test_error_for_an_unknown_metric_lists_the_available_metrics(fit: Fit):
    config = {"keras": "tf_keras", "make": lambda: ReportCheckpointCallback(metrics=["accuracy", "auc"])}
    with pytest.raises(TrainingFailedError, match=r"metrics=...\): expected .*\('loss', 'accuracy'\), got 'auc'"):
        fit(jobs.fit_with_callback, config, workers=1)


def test_unknown_event_is_rejected(fit: Fit):
    config = {"keras": "tf_keras", "make": lambda: ReportCheckpointCallback(checkpoint_on="epoch")}
    with pytest.raises(TrainingFailedError, match=r"checkpoint_on=...\): expected Keras events .*epoch_end.*'epoch'"):
        fit(jobs.fit_with_callback, config, workers=1)


def test_preempted_ranks_save_at_the_same_step_and_resume_there(fit: Fit):
    collector = Collector()
    result = fit(jobs.fit_until_preempted, run={"callbacks": [collector]})
    first, last = result.return_value
    assert collector.attempts == 2
    assert 13 <= first < 1000 * jobs.STEPS
    assert last == first + jobs.STEPS


def test_each_row_of_a_trainers_dataset_is_read_once_per_epoch(fit: Fit):
    (images, labels), _ = jobs.load_digits()
    images, labels = (np.concatenate([array, array[:1]]) for array in (images, labels))  # one rank has an extra row
    in_loop, generated, steps = fit(
        jobs.count_rows, {"batch_size": 100}, datasets={"train": {"image": images, "label": labels}}
    ).return_value
    assert in_loop == generated == 1501
    assert 2 * 15 <= steps <= 2 * 17  # of 100 rows, except the last; the first epoch may end with an empty batch


def test_keras_2_selected_by_environment_variable_works_behind_a_proxy(fit: Fit, monkeypatch: pytest.MonkeyPatch):
    """Workers connect to each other even if gRPC is configured to use a proxy for all connections."""
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    def train() -> list[float]:
        import tensorflow as tf

        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = jobs.make_perceptron(tf.keras, tf.keras.optimizers.SGD(0.1))
        images, labels = jobs.load_digits()[0]
        model.fit(images, labels, batch_size=jobs.BATCH, callbacks=[ReportCheckpointCallback()], verbose=0)

    result = fit(train)
    assert result.metrics["loss"] < 2.3
    assert result.checkpoint is not None
