"""A job of two workers for the conformance kits: it reports, commits checkpoints, fails, is retried, and resumes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

from drivetrain import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    report,
)
from drivetrain_testing._checks import forget_test_name

__all__ = ["CHECKPOINTS", "FAILS_AT", "STEPS", "IntendedError", "make_trainer", "run_two_workers", "train"]

STEPS = 6
CHECKPOINTS = (2, 4, 6)
FAILS_AT = 3
_PAUSE_S = 60.0


class IntendedError(Exception):
    """The exception with which the train function fails because a kit has requested it."""


def make_trainer(
    directory: Path, *, failures: int = 0, kill: bool = False, pause: bool = False, workers: int = 2, **run_config: Any
) -> DataParallelTrainer:
    """Return a trainer whose run is stored as ``run`` in a directory.

    Args:
        directory: the storage path of the run, and the place of the files with which the ranks wait for each other.
        failures: the number of attempts that fail, each after :data:`FAILS_AT` or more steps.
        kill: True if these attempts fail because a worker is killed, instead of by an exception.
        pause: True if the ranks wait after the first step until they are terminated.
        workers: the number of workers.
        **run_config: fields of the ``RunConfig``.
    """
    forget_test_name()
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "name": "run",
        "storage_path": directory,
        "verbose": 0,
        "worker_output": "none",
        "failure_config": FailureConfig(max_failures=failures),
        "start_timeout_s": 120,
        **run_config,
    }
    return DataParallelTrainer(
        train,
        train_loop_config={"directory": str(directory), "failures": failures, "kill": kill, "pause": pause},
        scaling_config=ScalingConfig(num_workers=workers, runtime="local" if workers else "inprocess"),
        run_config=RunConfig(**settings),
    )


def run_two_workers(directory: Path, **options: Any) -> Result:
    """Run the job of :func:`make_trainer`, with the same arguments."""
    return make_trainer(directory, **options).fit()


def train(config: dict[str, Any]) -> int:
    """Report :data:`STEPS` steps, with checkpoints after the steps in :data:`CHECKPOINTS`; continue after the latest.

    Returns:
        The number of the attempt.
    """
    context = get_context()
    step = _restored_step()
    while step < STEPS:
        step += 1
        _report(step, context.get_world_rank(), context.attempt)
        if config["pause"]:
            threading.Event().wait(_PAUSE_S)
        if context.attempt < config["failures"] and step >= FAILS_AT:
            _wait_for_all(Path(config["directory"], f".attempt_{context.attempt}"), context.get_world_rank())
            if config["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise IntendedError("the train function fails because the conformance kit has requested it")
    return context.attempt


class _Array:
    """An array with one element, as a framework reports it. Callbacks and trackers receive it as a number."""

    shape = ()

    def item(self) -> float:
        return 0.5


def _report(step: int, rank: int, attempt: int) -> None:
    metrics = {
        "loss": 1 / step,
        "step": step,
        "attempt": attempt,
        "eval": {"score": 2.0 * step, "classes": {"first": 0.25}},
        "not_a_number": math.nan,
        "infinite": math.inf,
        "text": "in words",
        "flag": True,
        "nothing": None,
        "items": [1.0, 2.0],
        "array": _Array(),
    }
    if step not in CHECKPOINTS:
        report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{rank}.json").write_text(json.dumps({"step": step}))
        report(metrics, checkpoint=Checkpoint.from_directory(directory))


def _restored_step() -> int:
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(json.loads(Path(directory, f"rank_{get_context().get_world_rank()}.json").read_text())["step"])


def _wait_for_all(pipe: Path, rank: int) -> None:
    """On rank 0, wait until the other rank has made the same reports; on the other rank, wait to be terminated.

    Without the wait, the failure could come before the commit of an earlier checkpoint, for which all ranks must have
    reported. Opening a named pipe blocks until the other side opens it too.
    """
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe)
    pipe.open("rb" if rank == 0 else "wb").close()
    if rank:
        threading.Event().wait(_PAUSE_S)
