"""A search of 20 trials of one second, 2 at a time, each with one worker and 10 reports, and Ray Train in Ray Tune.

A trial waits for a second without computing. Its overhead is the time of the search divided by its ten
rounds of two trials, minus that second. drivetrain runs them with Optuna on this machine; in Ray Tune with workers that
are actors; and in Ray Tune as processes of the trials' actors, which Tune reuses.
"""

from collections.abc import Iterator

from benchmarks.jobs.searching import AT_A_TIME, SECONDS, TRIALS
from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 3
PEER = "Ray Train in Ray Tune"
IN_TUNE, REUSED = f"{OURS} in Ray Tune", f"{OURS} in Ray Tune, actors reused"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            OURS: Job(script="tunes_drivetrain.py"),
            IN_TUNE: Job(script="tunes_drivetrain.py", arguments={"search": "ray", "runtime": "ray"}),
            REUSED: Job(script="tunes_drivetrain.py", arguments={"search": "ray", "runtime": "local"}),
            PEER: Job(script="tunes_raytrain.py", limit_s=900),
        }
    )
    goals = [Goal(bound=0.5, of=PEER, side=side) for side in (OURS, IN_TUNE, REUSED) if {side, PEER} <= runs.keys()]
    yield quantity("the search", "s", runs, search_s, *goals)
    yield quantity("... with the start of everything", "s", runs, lambda run: run.last("search_ended") - run.started)
    yield quantity(
        *("overhead of a trial", "s", runs),
        lambda run: search_s(run) * AT_A_TIME / TRIALS - SECONDS,
        compared=(),
    )


def search_s(run: Run) -> float:
    return run.last("search_ended") - run.last("search_starts")
