"""Trains with checkpoints in ``acme://runs``; rank 1 is killed, and the run resumes in a second driver."""

import json
import os
import pathlib
import signal
import sys
import tempfile

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)

STEPS = 5
arguments = json.loads(sys.argv[1])


def train(config: dict[str, int]) -> int:
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
        if step == config["killed_in"] and context.attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return first


def fit(killed_in: int, max_failures: int) -> Result:
    return DataParallelTrainer(
        train,
        train_loop_config={"killed_in": killed_in},
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(
            name="run",
            storage_path="acme://runs",
            resume="auto",
            verbose=0,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    try:
        fit(arguments["killed_in"], arguments["max_failures"])
    except TrainingFailedError as error:
        print(error)
    result = Result.from_path("acme://runs/run")
    assert result.checkpoint is not None
    target = pathlib.Path(result.checkpoint.to_directory(arguments["target"]))
    print(
        json.dumps(
            {
                "steps": [metrics["step"] for _, metrics in result.best_checkpoints],
                "first": result.metrics["first"],
                "files": {file.name: file.stat().st_size for file in target.glob("[sw]*")},
                "step": (target / "step_1").read_text(),
            }
        )
    )
