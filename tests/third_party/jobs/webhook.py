"""Trains with the webhook, first with a lost worker, and then in this process for each further URL."""

import json
import os
import signal
import sys

import drivetrain
from drivetrain import ConfigurationError, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

arguments = json.loads(sys.argv[1])


def train() -> None:
    context = drivetrain.get_context()
    if context.attempt == 0 and context.get_world_rank() == 0 and context.get_world_size() > 1:
        drivetrain.report({"loss": float("nan"), "eval": {"accuracy": 0.5}})
        os.kill(os.getpid(), signal.SIGKILL)
    drivetrain.report({"loss": 0.25})


def fit(name: str, num_workers: int, options: dict[str, object]) -> None:
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=num_workers, runtime="local" if num_workers else None),
        run_config=RunConfig(
            name=name,
            storage_path=arguments["storage_path"],
            verbose=0,
            callbacks=[("webhook", options)],
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


for number, options in enumerate(arguments["webhooks"]):
    try:
        fit(f"run-{number}", 0 if number else 2, options)
        print("succeeded", flush=True)
    except ConfigurationError as error:
        print(error, flush=True)
