"""A usual "if rank == 0: save" loop: each checkpoint is committed within a second, whatever the other ranks report.

The other ranks report nothing, only at first, less often, or not any more, or rank 0 makes an additional report with
each checkpoint. A kill costs at most one checkpoint interval, and no directories accumulate.
"""
# arguments: local
# campaign: ray; command

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)

RUNTIME = sys.argv[1]
STEPS, INTERVAL = 100, 10
LOOPS = ("only", "early", "extra", "less", "stops", "both")


class Delays(Callback):
    """Measures the seconds from the report of each checkpoint to its commit."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_checkpoint(self, run, checkpoint) -> None:
        self.seconds.append(time.time() - checkpoint.metrics["reported"])


def save(step: int, name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, name).write_text(str(step))
        drivetrain.report({"step": step, "reported": time.time()}, checkpoint=Checkpoint.from_directory(directory))


def report_metrics(kind: str, rank: int, step: int) -> None:
    """Report as the ranks of this loop do, in addition to the checkpoints."""
    is_first = rank == 0
    if (
        kind == "extra"
        or (kind == "less" and (is_first or step % 7 == 0))
        or (kind == "stops" and (is_first or step < STEPS / 5))
    ):
        drivetrain.report({"loss": 1.0})


def train(config: dict) -> list[str]:
    context, kind = drivetrain.get_context(), config["kind"]
    rank = context.get_world_rank()
    if context.attempt == 1:
        checkpoint = drivetrain.get_checkpoint()
        return [*sorted(os.listdir(checkpoint.path)), Path(checkpoint.path, "step.txt").read_text()]
    if kind == "early":
        drivetrain.report({"step": 0})
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        report_metrics(kind, rank, step)
        if step % INTERVAL == 0 and rank == 0:
            save(step, "step.txt")
        elif step % INTERVAL == 0 and kind == "both":
            save(step, f"part_{rank}.txt")
    if rank == 0:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return []


if __name__ == "__main__":
    wrong = []
    for kind in LOOPS:
        delays = Delays()
        result = DataParallelTrainer(
            train,
            train_loop_config={"kind": kind},
            scaling_config=ScalingConfig(num_workers=2, runtime=RUNTIME),
            run_config=RunConfig(
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                callbacks=[delays],
                verbose=0,
            ),
        ).fit()
        *files, step = result.return_value
        directories = list(Path(result.path).glob("checkpoint_*"))
        print(f"{kind}: resumed at {step} with {files}, delays {[round(delay, 2) for delay in delays.seconds]}")
        expected = ["part_1.txt", "step.txt"] if kind == "both" else ["step.txt"]
        is_complete = [name for name in files if not name.startswith(".")] == expected
        is_late = sorted(delays.seconds)[len(delays.seconds) // 2] > 1  # the median, because the machine may be busy
        if int(step) < STEPS - INTERVAL or not is_complete or len(directories) > 2 or is_late:
            wrong.append(kind)
    print("wrong:", wrong)
    sys.exit(bool(wrong))
