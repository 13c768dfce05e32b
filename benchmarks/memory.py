"""Memory of the trivial torch job while its train functions run: PSS, which divides shared pages among their users.

The control plane is the driver and every other process that is not a worker. It shares most of its pages with the
workers, so the goal is about all processes together.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, over, quantity

PAIRS = 5
LAZY = "drivetrain, torch imported in the function"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="start_drivetrain.py", hold=2),
            LAZY: Job(script="start_drivetrain_lazy.py", hold=2),
            "torchrun": Job(
                script="start_torchrun.py",
                launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
                hold=2,
            ),
            "Ray Train": Job(script="start_raytrain.py", hold=2),
            "bare interpreter": Job(script="bare.py", hold=1),
        }
    )
    bare = [run.pss("all") for run in runs.pop("bare interpreter")]
    control_plane = quantity("control plane", "MB", runs, lambda run: run.pss("control plane"))
    yield over(control_plane, "control plane over a bare interpreter", bare)
    worker = quantity("a worker", "MB", runs, lambda run: run.pss("worker"))
    yield worker
    if theirs := worker.values.get("torchrun"):
        yield over(worker, "a worker over torchrun's", theirs, Goal(bound=15), Goal(bound=15, side=LAZY))
    yield quantity("driver", "MB", runs, lambda run: run.pss("driver"))
    goals = (Goal(bound=0.75, of="torchrun"), Goal(bound=0.75, of="torchrun", side=LAZY))
    yield quantity("whole job", "MB", runs, lambda run: run.pss("all"), *goals)
    yield quantity("processes of the job", "", runs, lambda run: len(run.memory))
