"""``Model.fit`` of Keras 2 on two workers, and Keras 3 where it can."""

from collections.abc import Callable

import pytest

from drivetrain import Result
from tests.support import Collector
from tests.tf import jobs

Fit = Callable[..., Result]


def test_keras_2_learns_and_a_killed_worker_costs_nothing_of_it(fit: Fit):
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
