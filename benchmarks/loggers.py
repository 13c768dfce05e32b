"""The cost of loggers for the train function: median report(metrics) with all file loggers, and with none; 2 workers.

The file loggers are JSON, CSV and TensorBoard. There is 1 ms of computing between two calls, and for the second
quantity none, so that the driver cannot keep up with either side. The third is the time from the last report to the
return of fit(), in which the remaining reports are written.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 5
REPORTS = 10_000
WITH, WITHOUT = "drivetrain, file loggers", "without loggers"


def measure(bench: Bench) -> Iterator[Quantity]:
    for spin_us, name in ((1000, "report, median call"), (0, "report, median call without a pause")):
        runs = bench.alternate(
            {
                side: Job(script="logs_drivetrain.py", arguments={"reports": REPORTS, "spin_us": spin_us, **chosen})
                for side, chosen in ((WITH, {"loggers": 1}), (WITHOUT, {"loggers": 0}))
            }
        )
        goal = Goal(bound=1.2, of=WITHOUT, side=WITH)
        yield quantity(name, "us", runs, _median_us, goal, compared=[(WITH, WITHOUT)])
    yield quantity("last report to the end of fit()", "s", runs, _end_s, compared=[(WITH, WITHOUT)])


def _median_us(run: Run) -> float:
    return run.mean("reported", "median_us")


def _end_s(run: Run) -> float:
    return run.last("fit_ended") - run.last("reported")
