"""A checkpoint with files of several ranks is never used without one of them, although the ranks save at other times.

Rank 1 saves seconds after rank 0. The second attempt resumes from a checkpoint with the files of both, at whichever
moment rank 1 is killed. If the ranks are declared, this holds for the first checkpoint, too.
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
from drivetrain import Checkpoint, CheckpointConfig, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

RUNTIME = sys.argv[1]


def train(config: dict) -> list[str] | None:
    context = drivetrain.get_context()
    rank = context.get_world_rank()
    if context.attempt == 1:
        checkpoint = drivetrain.get_checkpoint()
        if checkpoint is None:
            return None
        return sorted(name for name in os.listdir(checkpoint.path) if not name.startswith("."))
    for step in range(1, 7):
        if rank == 1 and step >= config["slow_from"]:
            time.sleep(1.2)
        if (rank, step) == (1, config["killed"]):
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"part_{rank}.txt").write_text(str(step))
            checkpoint = Checkpoint.from_directory(directory)
            drivetrain.report({"step": step}, checkpoint, checkpoint_ranks=config["ranks"])
    time.sleep(60)
    return None


if __name__ == "__main__":
    wrong = []
    for ranks, slow_from, killed in (("all", 1, 1), ("all", 1, 4), (None, 2, 2), (None, 2, 4), (None, 1, 2)):
        result = DataParallelTrainer(
            train,
            train_loop_config={"ranks": ranks, "slow_from": slow_from, "killed": killed},
            scaling_config=ScalingConfig(num_workers=2, runtime=RUNTIME),
            run_config=RunConfig(
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                verbose=0,
            ),
        ).fit()
        found = result.return_value
        print(f"checkpoint_ranks={ranks}, slow from {slow_from}, killed before save {killed}: resumed with {found}")
        if found != ["part_0.txt", "part_1.txt"] and not (found is None and slow_from == 1 and killed < 4):
            wrong.append((ranks, slow_from, killed))
    sys.exit(bool(wrong))
