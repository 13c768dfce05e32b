"""Steps per second of a small perceptron in JAX, 2 workers, compared with the same script started by hand.

By hand: a process for each worker, which calls ``jax.distributed.initialize``. drivetrain also reports every step.
"""

from collections.abc import Iterator

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, quantity

PAIRS = 5
BY_HAND = "jax.distributed by hand"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate({OURS: Job(script="jax_drivetrain.py"), BY_HAND: Job(script="jax_by_hand.py")})
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of=BY_HAND, at_least=True),
        compared=[(OURS, BY_HAND)],
    )
