"""Ctrl-C and a closed terminal end a script with a hint how to resume, and without a screen of internal frames."""
# arguments: SIGINT 2; SIGHUP 2; SIGTERM 2; SIGINT 0
# campaign: SIGINT ray; SIGHUP ray

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import drivetrain
from drivetrain import Callback, Checkpoint, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain.plugin import Run


def train() -> None:
    step = 0
    while True:
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"state_{drivetrain.get_context().get_world_rank()}").touch()
            drivetrain.report({"step": step}, Checkpoint.from_directory(directory) if step == 1 else None)


class InterruptAfterCommit(Callback):
    """Sends the signal to the driver, as a terminal does."""

    def on_checkpoint(self, run: Run, checkpoint: object) -> None:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))


def run(workers: str) -> None:
    scaling = (
        ScalingConfig(num_workers=2, runtime="ray") if workers == "ray" else ScalingConfig(num_workers=int(workers))
    )
    config = RunConfig(name="my-run", verbose=1, callbacks=[InterruptAfterCommit()])
    DataParallelTrainer(train, scaling_config=scaling, run_config=config).fit()


if __name__ == "__main__":
    number, workers, *inside = sys.argv[1:]
    if inside:
        run(workers)
    done = subprocess.run(
        [sys.executable, __file__, number, workers, "inside"], stderr=subprocess.PIPE, text=True, check=False
    )
    print(done.stderr)
    trace = done.stderr.partition("Traceback (most recent call last)")[2].splitlines()
    checks = {
        "hint": 'run the script again with RunConfig(name="my-run", resume="auto")' in done.stderr,
        "traceback": len(trace) < 16,
        "interrupted": done.returncode not in (0, 1) or workers == "ray",
        "recorded": not Result.from_path(Path(os.environ["DRIVETRAIN_STORAGE_PATH"], "my-run")).completed,
    }
    print(done.returncode, checks)
    sys.exit(0 if all(checks.values()) else 1)
