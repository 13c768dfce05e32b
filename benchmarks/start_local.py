"""Process start to the train function with its process group ready, and the whole trivial job; 2 workers, Gloo.

drivetrain's job comes in two styles: torch imported at the top of the script, as most users write it, so that the
driver also pays for the import, and imported in the train function. Then a second ``fit()`` of the same driver: from
its call to the train function, and to the end of the first backward pass under DDP.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 7
LAZY = "drivetrain, torch imported in the function"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="start_drivetrain.py"),
            LAZY: Job(script="start_drivetrain_lazy.py"),
            "torchrun": Job(
                script="start_torchrun.py",
                launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            ),
            "Ray Train": Job(script="start_raytrain.py"),
        }
    )
    yield quantity(
        *("process start -> train function", "s", runs, lambda run: run.last("train_function") - run.started),
        *(Goal(bound=0.9, of="torchrun", side=side) for side in ("drivetrain", LAZY)),
    )
    yield quantity(
        *("whole trivial job", "s", runs, lambda run: run.ended - run.started),
        *(Goal(bound=1.0, of="torchrun", side=side) for side in ("drivetrain", LAZY)),
        Goal(bound=0.2, of="Ray Train"),
    )

    again = bench.alternate(
        {"drivetrain": Job(script="refit_drivetrain.py"), "Ray Train": Job(script="refit_raytrain.py")}
    )
    for name, point, bound in (
        ("second fit() -> train function", "train_function", 0.15),
        ("second fit() -> first DDP backward done", "backward", 0.25),
    ):
        yield quantity(
            name, "s", again, lambda run, point=point: run.last(point) - run.last("fit_called"), Goal(bound=bound)
        )
