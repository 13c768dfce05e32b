"""Trains with checkpoints in ``acme://runs``, or resumes this run. Rank 1 is killed after a step."""

import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
from typing import Any

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from tests.support import release, wait_for_release

STEPS = 5
arguments = json.loads(sys.argv[1])


def train(config: dict[str, Any]) -> int:
    context, first = drivetrain.get_context(), 0
    rank = context.get_world_rank()
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            first = int(pathlib.Path(directory, f"step_{rank}").read_text())
    for step in range(first + 1, STEPS + 1):
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, f"step_{rank}").write_text(str(step))
            pathlib.Path(directory, f"weights_{rank}").write_bytes(bytes([step]) * 100_000)
            drivetrain.report({"step": step, "first": first}, Checkpoint.from_directory(directory))
        if step == config["killed_in"] and context.attempt == 0:
            if rank == 0:
                release(config["pipe"])
                threading.Event().wait()
            wait_for_release(config["pipe"])
            os.kill(os.getpid(), signal.SIGKILL)
    return first


def fit() -> Result:
    return DataParallelTrainer(
        train,
        train_loop_config={"killed_in": arguments["killed_in"], "pipe": arguments["pipe"]},
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(
            name="run",
            storage_path="acme://runs",
            resume="auto",
            verbose=0,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=arguments["max_failures"]),
        ),
    ).fit(raise_on_failure=False)


if __name__ == "__main__":
    error = fit().error
    result = Result.from_path("acme://runs/run")
    assert result.checkpoint is not None
    target = pathlib.Path(result.checkpoint.to_directory(arguments["target"]))
    print(
        json.dumps(
            {
                "error": error and str(error),
                "steps": [metrics["step"] for _, metrics in result.best_checkpoints],
                "first": result.metrics["first"],
                "files": {file.name: file.stat().st_size for file in target.glob("[sw]*")},
                "step": (target / "step_1").read_text(),
            }
        )
    )
