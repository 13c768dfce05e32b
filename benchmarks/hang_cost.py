"""Steps per second with RunConfig(hang_timeout_s=30) over those without: short steps with a report each, 2 workers.

One driver runs both in turn, half a second each, so that other load on the machine affects both. The noise of the clock
still exceeds the goal's margin unless the machine is idle. The CPU time of the driver and one worker is less noisy, and
contains all costs of the watch.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, readings

PAIRS = 3
FITS = 80
WITH, WITHOUT = "drivetrain", "drivetrain, not watched"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate({WITH: Job(script="hang_drivetrain.py", arguments={"fits": FITS})})
    sides = {WITH: runs[WITH], WITHOUT: runs[WITH]}
    for name, unit, fact in (("steps a second", "/s", "per_second"), ("steps a CPU second", "/s", "per_cpu_second")):
        yield readings(
            *(name, unit, sides),
            lambda run, side, fact=fact: run.facts("trained", fact, watched=side == WITH),
            Goal(bound=0.995, of=WITHOUT, at_least=True),
            count=FITS // 2,
            compared=[(WITH, WITHOUT)],
        )
