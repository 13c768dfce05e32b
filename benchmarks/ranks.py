"""The driver with up to 10,000 simulated ranks: CPU time per report and rank, memory per rank, CPU time of a failure.

The driver is the real one. The ranks are those of the simulation in ``tests/simulation``, whose own time and memory are
left out. Each rank reports with a combined metric, and every fifth report has a checkpoint with a file of each rank.
The time of the reports includes the commits of these checkpoints. A failure is the loss of a node with eight ranks. Its
time ends when the ranks of the next attempt have received their tasks.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 3
RANKS = (100, 1_000, 10_000)
STEPS = {100: 200, 1_000: 40, 10_000: 10}


def measure(bench: Bench) -> Iterator[Quantity]:
    few, *many = (f"drivetrain, {ranks:,} ranks" for ranks in RANKS)
    runs = bench.alternate(
        {
            f"drivetrain, {ranks:,} ranks": Job(
                script="simulates_ranks.py", arguments={"ranks": ranks, "steps": STEPS[ranks]}, limit_s=300
            )
            for ranks in RANKS
        }
    )
    pairs = [(side, few) for side in many]
    linear = [Goal(side=side, bound=1.2, of=few) for side in many]
    soon = [Goal(side=side, bound=2.0) for side in many]
    for name, unit, fact, goals in (
        ("CPU time per report and rank", "us", "report_us", linear),
        ("memory per rank", "kB", "rank_kb", linear),
        ("CPU time of a failure", "s", "failure_s", soon),
    ):
        yield quantity(name, unit, runs, lambda run, fact=fact: run.mean("simulated", fact), *goals, compared=pairs)
