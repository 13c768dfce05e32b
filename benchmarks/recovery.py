"""From SIGKILL of one of 2 torch workers (DDP, Gloo) to the first step of the restarted function.

The step follows the load of a small checkpoint, and counts when the last rank has made it. torchrun's agent keeps its
store, whose keys of the former group make most restarts with Gloo fail by default; so its workers get their own store.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 5
LOCAL, RAY, SPARES = "drivetrain", "drivetrain, ray", "drivetrain, ray, spares"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            LOCAL: Job(script="recovers_drivetrain.py"),
            "torchrun": Job(
                script="recovers_torchrun.py",
                launcher=(
                    *("-m", "torch.distributed.run"),
                    *("--standalone", "--nproc-per-node=2", "--max-restarts=1"),
                ),
                environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            ),
            RAY: Job(script="recovers_drivetrain.py", arguments={"runtime": "ray"}),
            SPARES: Job(script="recovers_drivetrain.py", arguments={"runtime": "ray", "spares": 2}),
            "Ray Train": Job(script="recovers_raytrain.py"),
        }
    )
    compared = [(LOCAL, "torchrun"), (LOCAL, "Ray Train"), (RAY, "Ray Train"), (SPARES, "Ray Train")]
    compared = [(mine, peer) for mine, peer in compared if mine in runs and peer in runs]
    yield quantity(
        *("SIGKILL -> first step again", "s", runs, lambda run: run.last("stepped") - run.last("killed")),
        *(Goal(bound=0.25, of="torchrun"), Goal(bound=0.35), Goal(bound=0.4, of="Ray Train", side=RAY)),
        compared=compared,
    )
    yield quantity(
        *("... -> the train function again", "s", runs, lambda run: run.last("train_function") - run.last("killed")),
        compared=compared,
    )
    yield from stages({side: found for side, found in runs.items() if side in (LOCAL, RAY, SPARES)})


def stages(runs: Mapping[str, Sequence[Run]]) -> Iterator[Quantity]:
    """The stages of drivetrain's controller meanwhile."""
    for name, point in (
        ("... -> its group is being ended", "noticed"),
        ("... -> it is ended", "group_ended"),
        ("... -> the next one is started", "group_started"),
    ):
        yield quantity(name, "s", runs, lambda run, point=point: _after(run, point), compared=())


def _after(run: Run, point: str) -> float:
    """Return the first time after the kill."""
    killed = run.last("killed")
    return min(stamp["time"] for stamp in run.named(point) if stamp["time"] > killed) - killed
