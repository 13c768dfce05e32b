"""What the trials of the benchmark ``tune`` do: a second of waiting, in ten reports."""

import time
from collections.abc import Callable
from typing import Any

TRIALS, AT_A_TIME, REPORTS, SECONDS = 20, 2, 10, 1.0


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Waits instead of computing, so that what else a trial costs has the cores to itself."""
    for step in range(REPORTS):
        time.sleep(SECONDS / REPORTS)
        report({"score": config["x"] * step})
