"""One driver that performs many runs with random faults, and measures its resources; test_soak.py starts it."""

import contextlib
import gc
import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from drivetrain import CheckpointConfig, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from tests.faults.scenarios import VICTIM, FailsInSetup, Moment, Plan, train
from tests.support import Pipe

WARM_UP = {"local": 6, "ray": 3}
FAULTS = [
    "",
    "SIGKILL",
    "SIGSTOP",
    "SIGSEGV",
    "sys.exit(0)",
    "os._exit(3)",
    "exception whose __init__ requires arguments",
    "unpicklable exception",
    "memory limit",
    "backend set-up",
]


def run(runtime: str, chosen: random.Random, number: int, directory: Path, memory: Path) -> str:
    """Perform one run with a fault, which it may or may not survive, and return a description."""
    fault = FAULTS[number % len(FAULTS)] if number < len(FAULTS) else chosen.choice(FAULTS)
    moments = [Moment.FIRST, Moment.RESTART] if fault == "backend set-up" else list(Moment)
    moment, retries = chosen.choice(moments), chosen.randint(0, 2)
    mine = directory / str(number)
    mine.mkdir()
    plan = Plan(fault=fault, moment=moment, directory=str(mine))
    pipes = [Pipe(Path(plan.gate(attempt, rank))) for attempt in range(3) for rank in range(2)]
    runs = memory if moment is Moment.UPLOAD else mine
    result = DataParallelTrainer(
        train,
        train_loop_config={"plan": plan},
        backend_config=FailsInSetup(plan) if fault == "backend set-up" else None,
        scaling_config=ScalingConfig(num_workers=2, runtime=runtime),
        run_config=RunConfig(
            name=f"run_{number}",
            storage_path=runs,
            verbose=0,
            hang_timeout_s=5.0 if fault == "SIGSTOP" else None,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=retries),
        ),
    ).fit(raise_on_failure=False)
    for pipe in pipes:
        pipe.close()
    needed = (moment is Moment.RESTART) + (fault not in ("", "sys.exit(0)"))
    assert (result.error is None) == (retries >= needed), (fault, moment, retries, result.error)
    shutil.rmtree(result.path)
    shutil.rmtree(mine)
    return f"{fault or 'none'}, {moment.value}, {retries} retries, rank {VICTIM}"


def measure() -> dict[str, int]:
    """Return the resources held by this process."""
    gc.collect()
    process = psutil.Process()
    return {
        "rss_kib": process.memory_info().rss >> 10,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "python_threads": threading.active_count(),
        "children": len(process.children(recursive=True)),
        "objects": len(gc.get_objects()),
    }


def main(given: dict[str, Any]) -> dict[str, Any]:
    chosen = random.Random(given["seed"])
    samples = []
    warm_up = WARM_UP[given["runtime"]]
    if given["runtime"] == "ray":
        import ray

        # Its permanent processes and threads exist from the first run on.
        ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    for number in range(warm_up + given["runs"]):
        what = run(given["runtime"], chosen, number, Path(given["directory"]), Path(given["memory"]))
        if number >= warm_up - 1:
            samples.append({**measure(), "after": what})
    named = sorted(thread.name for thread in threading.enumerate())
    open_files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them
            open_files.append(os.readlink(descriptor))
    return {"samples": samples, "threads": named, "open_files": sorted(open_files)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
