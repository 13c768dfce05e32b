"""Trains on workers that are killed, with the policy ``exponential_backoff``."""

import json
import os
import pathlib
import signal
import sys
import tempfile
import time

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)

arguments = json.loads(sys.argv[1])


def train(config: dict[str, int]) -> None:
    attempt = drivetrain.get_context().attempt
    if attempt == config["commit_in_attempt"]:
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, "weights").touch()
            drivetrain.report({"attempt": attempt}, Checkpoint.from_directory(directory))
    if attempt == config["error_in_attempt"]:
        raise ValueError("mine")
    os.kill(os.getpid(), signal.SIGKILL)


class Watch(Callback):
    """Prints the seconds between each failure and the next attempt."""

    def on_failure(self, run: object, failure: object, retrying: bool) -> None:
        self.failed = time.monotonic()
        print("retrying" if retrying else "giving up", flush=True)

    def on_group_start(self, run: object, attempt: int, workers: object) -> None:
        if attempt:
            print(time.monotonic() - self.failed, flush=True)


try:
    DataParallelTrainer(
        train,
        train_loop_config={"commit_in_attempt": 2, "error_in_attempt": 4},
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(
            storage_path=arguments["storage_path"],
            verbose=0,
            callbacks=[Watch()],
            failure_config=FailureConfig(policy="exponential_backoff"),
        ),
    ).fit()
except TrainingFailedError as error:
    print(error.kind.value)
