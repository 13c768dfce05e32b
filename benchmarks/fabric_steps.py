"""Steps per second of a small perceptron under Lightning Fabric, 2 workers, compared with Fabric's own launcher."""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 9
LAUNCH = "Fabric's launcher"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {"drivetrain": Job(script="fabric_drivetrain.py"), LAUNCH: Job(script="fabric_launch.py")},
    )
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of=LAUNCH, at_least=True),
    )
    yield quantity("whole job", "s", runs, lambda run: run.ended - run.started)
