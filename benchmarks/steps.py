"""DDP steps per second of a small perceptron, 2 workers: with a report every step, and torchrun without reports."""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 9


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="steps_drivetrain.py"),
            "torchrun": Job(
                script="steps_torchrun.py",
                launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            ),
        }
    )
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of="torchrun", at_least=True),
    )
