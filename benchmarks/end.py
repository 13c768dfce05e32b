"""From the last rank's return to fit()'s, and from an exception on rank 1 to fit()'s; 2 workers.

While rank 1 raises, rank 0 is in a loop that takes a minute. Torch workers have used their process group (Gloo).
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 5
GOALS = (Goal(bound=0.1),)


def measure(bench: Bench) -> Iterator[Quantity]:
    for kind, script in (("no framework", "reports"), ("torch", "start")):
        for ending, fail in (("last return", 0), ("exception", 1)):
            jobs = {
                "drivetrain": Job(script=f"{script}_drivetrain.py", arguments={"fail": fail}, exit_code=fail),
                "Ray Train": Job(script=f"{script}_raytrain.py", arguments={"fail": fail}, exit_code=fail),
            }
            yield quantity(f"{ending} -> fit() ends, {kind}", "s", bench.alternate(jobs), _wait, *GOALS)


def _wait(run: Run) -> float:
    return run.last("fit_ended") - run.last("leaving")
