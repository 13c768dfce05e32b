"""Custom training loops under a strategy with two workers, with both Keras versions."""

from collections.abc import Callable

import pytest

from drivetrain import Result
from tests.support import Collector
from tests.tf import jobs

Fit = Callable[..., Result]


def test_loop_with_keras_2_learns(fit: Fit):
    assert fit(jobs.loop_digits, {"epochs": 6, "keras": "tf_keras"}).return_value >= 0.95


def test_loop_with_keras_3_and_a_killed_worker_has_the_losses_of_an_undisturbed_run(fit: Fit):
    collectors = Collector(), Collector()
    undisturbed, killed = (
        fit(
            jobs.loop_digits,
            {"epochs": 6, "keras": "keras", **death},
            max_failures=len(death),
            run={"callbacks": [collector]},
        )
        for death, collector in zip(({}, {"die_in_epoch": 3}), collectors, strict=True)
    )
    losses, losses_of_killed = ([metrics["loss"] for metrics in collector.metrics_of(0)] for collector in collectors)
    assert collectors[1].attempts == 2
    assert len(losses) == 6
    assert losses_of_killed[-6:] == pytest.approx(losses, rel=1e-6)
    assert undisturbed.return_value == killed.return_value >= 0.95


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_gradients_equal_those_of_a_single_process_with_the_global_batch(fit: Fit, keras: str):
    assert fit(jobs.difference_to_one_process, {"keras": keras}).return_value < 1e-5
