"""The cost of report(metrics) to the train function, and how many per second reach the storage; 2 workers.

Latency is that of the call itself, with 1 ms of computing between two calls, on both ranks at once. The sustained
rate has no pause: it counts one rank's reports from its train function's start until fit() has returned,
which is when every line is in ``result.json``. The floor is one process that writes a JSON line per report.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 5
PACED, SUSTAINED, PEER = 3000, 50_000, 4
SPIN_US = 1000


def measure(bench: Bench) -> Iterator[Quantity]:
    paced = bench.alternate(
        {
            "drivetrain": Job(script="reports_drivetrain.py", arguments={"reports": PACED, "spin_us": SPIN_US}),
            "JSON lines": Job(script="reports_floor.py", arguments={"reports": PACED, "spin_us": SPIN_US}),
            "Ray Train": Job(script="reports_raytrain.py", arguments={"reports": PEER, "spin_us": SPIN_US}),
        }
    )
    yield quantity("report, median call", "us", paced, lambda run: run.mean("reported", "median_us"), Goal(bound=20))
    paced.pop("Ray Train", None)  # makes too few for a percentile
    yield quantity("report, p99 of calls", "us", paced, lambda run: run.mean("reported", "p99_us"), Goal(bound=200))

    sustained = bench.alternate(
        {
            "drivetrain": Job(script="reports_drivetrain.py", arguments={"reports": SUSTAINED}),
            "JSON lines": Job(script="reports_floor.py", arguments={"reports": SUSTAINED}),
        }
    )
    yield quantity("reports sustained to storage, each rank", "/s", sustained, _rate, Goal(bound=10_000, at_least=True))


def _rate(run: Run) -> float:
    return SUSTAINED / (run.last("fit_ended") - run.first("train_function"))
