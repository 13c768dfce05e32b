"""fit() to the train function with its process group ready, and the whole trivial job, on Ray; 2 torch workers.

Cold: the script starts Ray, which is part of the time. Then on a running cluster of this machine, which every script
connects to through ``RAY_ADDRESS``, so that connecting is part of the time.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 5
GOALS = (Goal(bound=0.5, of="Ray Train"),)


def measure(bench: Bench) -> Iterator[Quantity]:
    yield from _compare(bench, "cold", {})
    with bench.ray_cluster(cpus=2) as address:
        yield from _compare(bench, "running cluster", {"RAY_ADDRESS": address})


def _compare(bench: Bench, where: str, environment: dict[str, str]) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="start_drivetrain.py", arguments={"runtime": "ray"}, environment=environment),
            "Ray Train": Job(script="start_raytrain.py", environment=environment),
        }
    )
    yield quantity(
        f"fit() -> train function, {where}",
        *("s", runs, lambda run: run.last("train_function") - run.last("fit_called"), *GOALS),
    )
    yield quantity(f"whole trivial job, {where}", "s", runs, lambda run: run.ended - run.started, *GOALS)
