"""Steps per second of a Lightning training, 2 workers, compared with Lightning's own launcher and Ray Train."""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 9


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="fits_drivetrain.py"),
            "Lightning's ddp": Job(script="fits_lightning.py"),
            "Ray Train": Job(script="fits_raytrain.py"),
        }
    )
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of="Lightning's ddp", at_least=True),
    )
