"""From a worker's death to its detection, and from an exception until fit() raises; the other rank loops forever.

Detection is the moment when the group is being ended. The floors are a parent that waits for its forked child, where
with torch the kernel takes a while to dismantle the process, and a driver that waits for an actor's method. Ray Train
notifies a callback of its detection.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, over, quantity

PAIRS = 5


def measure(bench: Bench) -> Iterator[Quantity]:
    for framework in ("none", "torch"):
        arguments = {"framework": framework}
        runs = bench.alternate(
            {
                "drivetrain": Job(script="fails_drivetrain.py", arguments=arguments, exit_code=1),
                "parent": Job(script="fails_floor.py", arguments=arguments),
            }
        )
        shown = {"none": "no framework"}.get(framework, framework)
        yield quantity(f"SIGKILL -> noticed, {shown}", "ms", runs, lambda run: _noticed(run) * 1e3, Goal(bound=20))

    on_ray = "drivetrain, ray"
    runs = bench.alternate(
        {
            on_ray: Job(script="fails_drivetrain.py", arguments={"runtime": "ray"}, exit_code=1),
            "Ray": Job(script="fails_ray.py"),
            "Ray Train": Job(script="fails_raytrain.py", exit_code=1),
        }
    )
    found = quantity("SIGKILL -> noticed, on Ray", "s", runs, _noticed)
    yield found
    if "Ray" in runs:
        beyond = over(
            found, "SIGKILL -> noticed, beyond Ray's own notice", found.values["Ray"], Goal(bound=1, side=on_ray)
        )
        del beyond.values["Ray"]
        yield beyond

    arguments = {"how": "exception"}
    runs = bench.alternate(
        {
            "drivetrain": Job(script="fails_drivetrain.py", arguments=arguments, exit_code=1),
            on_ray: Job(script="fails_drivetrain.py", arguments={**arguments, "runtime": "ray"}, exit_code=1),
            "Ray Train": Job(script="fails_raytrain.py", arguments=arguments, exit_code=1),
        }
    )
    yield quantity(
        *("exception -> fit() raises", "s", runs, lambda run: run.last("fit_ended") - run.last("failing")),
        *(Goal(bound=0.1, side=side) for side in ("drivetrain", on_ray)),
    )


def _noticed(run: Run) -> float:
    return run.first("noticed") - run.last("failing")
