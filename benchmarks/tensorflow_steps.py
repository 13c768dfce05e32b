"""Steps per second of a small perceptron in TensorFlow, 2 workers, compared with the same script started by hand.

By hand: a process for each worker, with ``TF_CONFIG`` set. drivetrain also reports every step.
"""

from collections.abc import Iterator

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, quantity

PAIRS = 9
BY_HAND = "TF_CONFIG by hand"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate({OURS: Job(script="tensorflow_drivetrain.py"), BY_HAND: Job(script="tensorflow_by_hand.py")})
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of=BY_HAND, at_least=True),
        compared=[(OURS, BY_HAND)],
    )
