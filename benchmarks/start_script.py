"""Process start to the train function and to the third step of a script as people write it; 2 workers, Gloo.

The scripts import torch at their top, and train a small network with DDP, a loader, AdamW and a scheduler.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 7
RUN = "drivetrain run"


def measure(bench: Bench) -> Iterator[Quantity]:
    command = str(Path(sys.executable).with_name("drivetrain"))
    runs = bench.alternate(
        {
            "drivetrain": Job(script="script_drivetrain.py"),
            RUN: Job(script="script_drivetrain.py", launcher=(command, "run"), separator=("--",)),
            "torchrun": Job(
                script="script_torchrun.py",
                launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            ),
        }
    )
    for name, point, bound, bound_of_run in (
        ("process start -> train function", "train_function", 0.6, 0.55),
        ("process start -> third step", "third_step", 0.7, 0.55),
    ):
        yield quantity(
            *(name, "s", runs, lambda run, point=point: run.last(point) - run.started),
            Goal(bound=bound, of="torchrun"),
            Goal(bound=bound_of_run, of="torchrun", side=RUN),
        )
