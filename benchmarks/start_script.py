"""Process start to the train function and to the third step of a script as people write it; 2 workers, Gloo.

The scripts import torch at their top, and train a small network with DDP, a loader, AdamW and a scheduler.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 7
RUN, WARM = "drivetrain run", "drivetrain run, warm"


def measure(bench: Bench) -> Iterator[Quantity]:
    command = str(Path(sys.executable).with_name("drivetrain"))
    run = Job(script="script_drivetrain.py", launcher=(command, "run"), separator=("--",))
    with bench.warm_server("script_drivetrain.py") as variables:
        runs = bench.alternate(
            {
                "drivetrain": Job(script="script_drivetrain.py"),
                RUN: run,
                WARM: replace(run, environment=variables),
                "torchrun": Job(
                    script="script_torchrun.py",
                    launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
                ),
            }
        )
    for name, point, bound, bound_of_run, bound_of_warm in (
        ("process start -> train function", "train_function", 0.6, 0.55, 0.1),
        ("process start -> third step", "third_step", 0.7, 0.55, 0.1),
    ):
        yield quantity(
            *(name, "s", runs, lambda run, point=point: run.last(point) - run.started),
            Goal(bound=bound, of="torchrun"),
            Goal(bound=bound_of_run, of="torchrun", side=RUN),
            Goal(bound=bound_of_warm, of="torchrun", side=WARM),
        )
