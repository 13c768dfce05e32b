"""Odd values neither fail a run nor distort its metrics.

A metric of 5,001 digits, a config whose `repr()` raises, a policy that returns a NumPy scalar, and a clock that is set
forward by a year between two reports.
"""

# arguments: inprocess; local
# campaign: ray

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import drivetrain
from drivetrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

YEAR_S = 365 * 24 * 3600


class Unprintable:
    """An object without a text."""

    def __repr__(self) -> str:
        """Raise an exception."""
        raise ValueError("no text")


def train(config: dict[str, Any]) -> str:
    """Fail once; then report an odd metric and set the clock."""
    marker = Path(config["directory"], "failed")
    if not marker.exists():
        marker.touch()
        raise ValueError("the first attempt fails")
    drivetrain.report({"loss": 1.0})
    real = time.time
    time.time = lambda: real() + YEAR_S
    try:
        drivetrain.report({"loss": 10**5000, "epoch": 10**5000})
    finally:
        time.time = real
    return type(config["model"]).__name__


def decide(latest: Any, history: Any) -> Any:
    """Retry once."""
    return np.bool_(len(history) == 0)


def main() -> None:
    """Train, and check the metrics."""
    runtime = sys.argv[1]
    scaling = ScalingConfig(num_workers=0) if runtime == "inprocess" else ScalingConfig(num_workers=1, runtime=runtime)
    with tempfile.TemporaryDirectory() as directory:
        result = DataParallelTrainer(
            train,
            train_loop_config={"directory": directory, "model": Unprintable()},
            scaling_config=scaling,
            run_config=RunConfig(
                name="run",
                storage_path=directory,
                failure_config=FailureConfig(policy=decide),
                detailed_metrics=True,
            ),
        ).fit()
        text = Path(directory, "run", "run.json").read_text()
    print(str(result)[:500])
    assert result.return_value == "Unprintable"
    assert result.metrics["loss"] == 10**5000
    assert 0 <= result.metrics["_time_this_iter_s"] < 3600
    assert 0 <= result.metrics["_time_total_s"] < 3600
    assert "Unprintable object, whose repr() raised ValueError" in text


if __name__ == "__main__":
    main()
