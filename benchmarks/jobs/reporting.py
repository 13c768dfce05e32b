"""The loop of the jobs that report: the duration of each call, with some work in between."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from stamps import end, hold, stamp


def reports(config: dict[str, Any], report: Callable[[dict[str, Any]], None], rank: int) -> None:
    """Report as often as configured, and stamp statistics of the calls in microseconds."""
    stamp(config, "train_function")
    nanoseconds = []
    more = {f"metric_{number}": 1 / (number + 3) for number in range(config.get("metrics", 3) - 3)}
    for step in range(config["reports"]):
        work_until = time.perf_counter_ns() + config["spin_us"] * 1000
        while time.perf_counter_ns() < work_until:
            pass
        metrics = {"loss": 1.0 / (step + 1), "accuracy": 0.5, "step": step, **more}
        before = time.perf_counter_ns()
        report(metrics)
        nanoseconds.append(time.perf_counter_ns() - before)
    stamp(config, "reported", reports=config["reports"], **figures(nanoseconds))
    hold(config)
    end(config, rank)


def figures(nanoseconds: list[int]) -> dict[str, float]:
    """Return the median, 99th percentile, longest and mean call."""
    if len(nanoseconds) < 2:
        return {}
    microseconds = sorted(value / 1000 for value in nanoseconds)
    return {
        "median_us": statistics.median(microseconds),
        "p99_us": microseconds[int(len(microseconds) * 0.99)],
        "max_us": microseconds[-1],
        "mean_us": statistics.fmean(microseconds),
    }
