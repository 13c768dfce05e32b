"""Start and steps per second of a small perceptron under Horovod, 2 workers: a report every step, and horovodrun."""

import sys
from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 9
PEER = "horovodrun"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="horovod_drivetrain.py"),
            PEER: Job(
                script="horovod_horovodrun.py",
                # The implementation of the command horovodrun. It starts a program, not a script.
                launcher=("-m", "horovod.runner.launch", "-np", "2", "--gloo", sys.executable),
            ),
        }
    )
    yield quantity(
        *("process start -> hvd.init() done", "s", runs, lambda run: run.last("initialized") - run.started),
        Goal(bound=1.0, of=PEER),
    )
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of=PEER, at_least=True),
    )
