"""A function that saves on a preemption notice, continues, and returns has finished: it is not run again.

A function that returns early because of the notice says so with `resume_later()`, and is run again from its checkpoint.
"""
# arguments: local continue; local return
# campaign: ray continue; ray return

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig

STEPS, NOTICE_AT = 60, 20
RUNTIME, REACTION = sys.argv[1:]


def save(step: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "step").write_text(str(step))
        is_first = drivetrain.get_context().get_world_rank() == 0
        drivetrain.report({"step": step}, Checkpoint.from_directory(directory) if is_first else None)


def train(config: dict[str, str]) -> list[int] | None:
    context = drivetrain.get_context()
    checkpoint = drivetrain.get_checkpoint()
    first = 0 if checkpoint is None else int(Path(checkpoint.path, "step").read_text())
    saved = False
    for step in range(first, STEPS):
        time.sleep(0.02)  # the work of a step
        if (step, context.attempt, context.get_world_rank()) == (NOTICE_AT, 0, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        if drivetrain.get_preemption_info() is not None and not saved:
            saved = True
            save(step + 1)
            if config["reaction"] == "return":
                return drivetrain.resume_later()
    drivetrain.report({"step": STEPS})
    return [context.attempt, first]


if __name__ == "__main__":
    result = DataParallelTrainer(
        train,
        train_loop_config={"reaction": REACTION},
        scaling_config=ScalingConfig(num_workers=2, runtime=RUNTIME),
        run_config=RunConfig(verbose=0),
    ).fit()
    print(result.return_value, result.metrics, result.completed)
    attempt, first = result.return_value
    was_resumed = attempt == 1 and first > NOTICE_AT
    as_expected = was_resumed if REACTION == "return" else (attempt, first) == (0, 0)
    sys.exit(0 if as_expected and result.completed and result.metrics["step"] == STEPS else 1)
