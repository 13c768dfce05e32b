"""The train function of the trials: a score that grows by ``x`` with each report, and resumes from a checkpoint."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Checkpoint
from tests.support import DEADLINE_S, send_line, wait_for_release

REPORTS = 8


def climb(config: dict[str, Any]) -> None:
    """Rank 0 saves a checkpoint with every report.

    Each rank sends its process id to ``config["pipe"]`` and waits at ``config["gate"]``, if they are set.
    """
    context = drivetrain.get_context()
    if "pipe" in config:
        send_line(config["pipe"], f"{context.get_trial_name()} {os.getpid()}")
    step, score = load()
    while step < config.get("reports", REPORTS):
        if "gate" in config and step == config.get("waits_after", 0):
            wait_for_release(config["gate"])
        if step == config.get("fails_after") and not Path(config["fixed"]).exists():
            raise ZeroDivisionError("a failure of the train function")
        step, score = step + 1, score + config["x"]
        report(step, score)


def load() -> tuple[int, float]:
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        return 0, 0.0
    with checkpoint.as_directory() as directory:
        step, score = Path(directory, "state").read_text().split()
    return int(step), float(score)


def report(step: int, score: float) -> None:
    if drivetrain.get_context().get_world_rank() != 0:
        drivetrain.report({})
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "state").write_text(f"{step} {score}")
        checkpoint = Checkpoint.from_directory(directory)
        drivetrain.report({"score": score, "step": step}, checkpoint=checkpoint)


def read_state(checkpoint: Any) -> tuple[int, float]:
    """Return the step and the score in a checkpoint of drivetrain or of Ray Tune."""
    step, score = Path(checkpoint.path, "state").read_text().split()
    return int(step), float(score)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
