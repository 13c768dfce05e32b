"""Two ranks report 20 metrics for a long time: the driver's time for a report, and how long the ranks wait.

With a pause, each rank computes for 0.1 ms between two reports, so that both of them occupy the two cores, which they
share with the driver. Without a pause, they are as fast as the driver.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 5
REPORTS, METRICS, SPIN_US = 50_000, 20, 100


def measure(bench: Bench) -> Iterator[Quantity]:
    for spin_us, pace in ((SPIN_US, "paced"), (0, "no pause")):
        arguments = {"reports": REPORTS, "metrics": METRICS, "spin_us": spin_us}
        runs = bench.alternate({"drivetrain": Job(script="reports_drivetrain.py", arguments=arguments)})
        short, longest = ([Goal(bound=10)], [Goal(bound=50)]) if spin_us else ([], [])
        yield quantity(f"driver's CPU time a report, {pace}", "us", runs, lambda run: run.mean("driver", "us"), *short)
        yield quantity(f"report, mean call, {pace}", "us", runs, lambda run: run.mean("reported", "mean_us"), *short)
        yield quantity(f"report, longest call, {pace}", "ms", runs, _longest_ms, *longest)


def _longest_ms(run: Run) -> float:
    return run.mean("reported", "max_us") / 1000
