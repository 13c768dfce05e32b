"""The function of the trials of the benchmark ``tune``: a second of waiting, in ten reports."""

import time
from collections.abc import Callable
from typing import Any

TRIALS, AT_A_TIME, REPORTS, SECONDS = 20, 2, 10, 1.0


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Wait instead of computing, so that the overhead of a trial has the cores to itself."""
    for step in range(REPORTS):
        time.sleep(SECONDS / REPORTS)
        report({"score": config["x"] * step})
