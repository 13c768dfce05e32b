"""Eight ranks with 20 metrics and a commit per minute, on S3: uploaded bytes, and what changes from start to end.

It takes DRIVETRAIN_BENCHMARK_MINUTES, by default ten. Each of the last four quantities is a mean over the last tenth of
the run, divided by the mean over its second tenth: 1 if nothing grows.
"""

import os
import statistics
from collections.abc import Callable, Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 1
MINUTES = float(os.environ.get("DRIVETRAIN_BENCHMARK_MINUTES", "10"))


def measure(bench: Bench) -> Iterator[Quantity]:
    with bench.s3_server(bench.directory / "served") as server:
        arguments = {"minutes": MINUTES, "commit_s": 60 * min(1.0, MINUTES / 40)}
        environment = {**server.environment, "AWS_ENDPOINT_URL": server.endpoint}
        job = Job(
            script="soaks_drivetrain.py", arguments=arguments, environment=environment, limit_s=60 * MINUTES + 300
        )
        runs = bench.alternate({"drivetrain": job})
    yield quantity("uploaded metrics", "x their size", runs, lambda run: run.mean("uploaded", "ratio"), Goal(bound=1.1))
    yield quantity("report, longest call", "ms", runs, lambda run: max(_values(run, "minute", "max_us")) / 1000)
    for name, stamped, fact, goal in (
        ("commit", "commit", "s", 1.1),
        ("driver's memory", "memory", "mb", 1.05),
        ("report, mean call", "minute", "mean_us", 1.1),
        ("report, longest call of a minute", "minute", "max_us", 1.1),
    ):
        growth = _growth_of(stamped, fact)
        yield quantity(f"{name}, end over start", "x", runs, growth, Goal(bound=goal))


def _values(run: Run, stamped: str, fact: str) -> list[float]:
    return [stamp[fact] for stamp in run.named(stamped)]


def _growth_of(stamped: str, fact: str) -> Callable[[Run], float]:
    def growth(run: Run) -> float:
        values = _values(run, stamped, fact)
        tenth = max(1, len(values) // 10)
        return statistics.fmean(values[-tenth:]) / statistics.fmean(values[tenth : 2 * tenth])

    return growth
