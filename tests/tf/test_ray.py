"""Training on Ray, whose workers are actors."""

from collections.abc import Callable

import pytest

from drivetrain import Result
from tests.support import Collector
from tests.tf import jobs


@pytest.mark.ray
@pytest.mark.slow
def test_killed_worker_on_ray_resumes_from_its_checkpoint(fit: Callable[..., Result], ray_address: str):
    collector = Collector()
    result = fit(
        jobs.loop_digits,
        {"epochs": 6, "keras": "keras", "die_in_epoch": 3},
        runtime="ray",
        max_failures=1,
        run={"callbacks": [collector]},
    )
    assert collector.attempts == 2
    assert len(collector.metrics_of(0)) in (6, 7), "at most one epoch is repeated"
    assert result.return_value >= 0.95
