"""A run whose driver was killed shows how long its attempts took, also after it was resumed.

The train function of the run reports nothing. The last program to read the output of a command may close its pipe.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

DRIVER = """
import os
import signal
import sys
import threading

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def train_func(config):
    threading.Event().wait(2.5)
    if config["kill"]:
        os.kill(config["driver"], signal.SIGKILL)


if __name__ == "__main__":
    DataParallelTrainer(
        train_func,
        train_loop_config={"driver": os.getpid(), "kill": sys.argv[1] == "kill"},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", resume="auto", verbose=0),
    ).fit()
"""


def show(*options: str, output: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "drivetrain", "runs", "show", "run", *options]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False)


def show_to_a_closed_pipe() -> "subprocess.CompletedProcess[str]":
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return show(output=writing)
    finally:
        os.close(writing)


def problems() -> list[str]:
    Path("driver.py").write_text(DRIVER)
    found = []
    for how in ("kill", "finish"):
        subprocess.run([sys.executable, "driver.py", how], timeout=100, check=False)
        run = json.loads(show("--json").stdout)
        for attempt in run["attempts"]:
            seconds = (attempt["ended"] or run["last_time"]) - attempt["began"]
            if not 1 <= seconds < 60:
                found.append(f"after {how}: attempt of driver {attempt['start']} has a duration of {seconds:.1f} s")
    if len(run["attempts"]) != 2:
        found.append(f"expected two attempts, got {run['attempts']}")
    shown = show_to_a_closed_pipe()
    if shown.returncode != 128 + signal.SIGPIPE or shown.stderr:
        found.append(f"with a closed pipe: exit code {shown.returncode}, {shown.stderr}")
    return found


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or "OK")
    sys.exit(bool(found))
