"""From the loss of one of 2 Ray nodes to the first step on the other; an elastic run of 2 torch workers (DDP, Gloo).

The node's raylet is killed by its worker, which then kills itself. The step follows the load of a small
checkpoint. The driver's node has no workers.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity
from benchmarks.recovery import stages

PAIRS = 5
OURS = "drivetrain"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            OURS: Job(script="recovers_drivetrain.py", arguments={"runtime": "ray", "nodes": 2}),
            "Ray Train": Job(script="recovers_raytrain.py", arguments={"nodes": 2}),
        }
    )
    yield quantity(
        *("node lost -> first step again", "s", runs, lambda run: run.last("stepped") - run.last("killed")),
        Goal(bound=0.5, of="Ray Train"),
    )
    yield quantity(
        *("... -> the train function again", "s", runs, lambda run: run.last("train_function") - run.last("killed"))
    )
    if OURS in runs:
        yield from stages({OURS: runs[OURS]})
