"""What trials of these tests train: a score that grows by ``x`` with each report, and goes on from a checkpoint."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Checkpoint
from tests.support import DEADLINE_S, tell, wait_for_release

REPORTS = 8


def climb(config: dict[str, Any]) -> None:
    """Rank 0 saves after every report; says its process id to ``pipe``, and waits at ``gate``, if there are any."""
    context = drivetrain.get_context()
    if "pipe" in config:
        tell(config["pipe"], f"{context.get_trial_name()} {os.getpid()}")
    done, score = load()
    while done < config.get("reports", REPORTS):
        if "gate" in config and done == config.get("waits_after", 0):
            wait_for_release(config["gate"])
        if done == config.get("fails_after") and not Path(config["mended"]).exists():
            raise ZeroDivisionError("the score fell off")
        done, score = done + 1, score + config["x"]
        report(done, score)


def load() -> tuple[int, float]:
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        return 0, 0.0
    with checkpoint.as_directory() as directory:
        done, score = Path(directory, "state").read_text().split()
    return int(done), float(score)


def report(done: int, score: float) -> None:
    if drivetrain.get_context().get_world_rank() != 0:
        drivetrain.report({})
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "state").write_text(f"{done} {score}")
        checkpoint = Checkpoint.from_directory(directory)
        drivetrain.report({"score": score, "step": done}, checkpoint=checkpoint)


def read_state(checkpoint: Any) -> tuple[int, float]:
    """What is in a checkpoint, of drivetrain or of Ray Tune."""
    done, score = Path(checkpoint.path, "state").read_text().split()
    return int(done), float(score)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
