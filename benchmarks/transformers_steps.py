"""Steps per second of a small GPT-2 in a transformers.Trainer, 2 workers, compared with torchrun and Ray Train."""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 9


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="transformers_drivetrain.py"),
            "torchrun": Job(
                script="transformers_torchrun.py",
                launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            ),
            "Ray Train": Job(script="transformers_raytrain.py"),
        }
    )
    compared = [("drivetrain", peer) for peer in ("torchrun", "Ray Train") if {"drivetrain", peer} <= runs.keys()]
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of="torchrun", at_least=True),
        compared=compared,
    )
