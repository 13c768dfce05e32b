"""The second run of an interactive trainer: from its call to the train function, to the first backward, to its end.

Two torch workers with a DDP model, on this machine and on Ray. They are compared with the second ``fit()`` of a driver,
which has new workers: of drivetrain's ``TorchTrainer``, forked from a process that has torch, and of Ray Train's.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 7
RAY = "drivetrain, on Ray"
FIT = "drivetrain's fit()"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="warm_drivetrain.py"),
            RAY: Job(script="warm_drivetrain.py", arguments={"runtime": "ray"}),
            FIT: Job(script="refit_drivetrain.py"),
            "Ray Train": Job(script="refit_raytrain.py"),
        }
    )
    yield quantity(
        *("second run() -> train function", "s", runs, lambda run: run.last("train_function") - run.last("fit_called")),
        *(Goal(bound=0.05), Goal(bound=0.05, side=RAY)),
    )
    yield quantity(
        *("second run() -> first DDP backward", "s", runs, lambda run: run.last("backward") - run.last("fit_called")),
    )
    warm = {side: found for side, found in runs.items() if side in ("drivetrain", RAY)}
    yield quantity(
        *("second run() -> its end", "s", warm, lambda run: run.last("fit_ended") - run.last("fit_called")),
    )
