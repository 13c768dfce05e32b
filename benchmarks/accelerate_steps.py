"""Steps per second of a small perceptron under Accelerate, 2 workers, compared with accelerate launch and Ray Train."""

from collections.abc import Iterator

from benchmarks.measure import Bench, Goal, Job, Quantity, quantity

PAIRS = 9
LAUNCH = "accelerate launch"


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate(
        {
            "drivetrain": Job(script="accelerate_drivetrain.py"),
            LAUNCH: Job(
                script="accelerate_launch.py",
                # Selects its launcher for several processes; without a GPU it would otherwise start one process.
                launcher=(
                    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
                    *("--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"),
                ),
                environment={"ACCELERATE_USE_CPU": "true"},
            ),
            "Ray Train": Job(script="accelerate_raytrain.py"),
        }
    )
    compared = [("drivetrain", peer) for peer in (LAUNCH, "Ray Train") if {"drivetrain", peer} <= runs.keys()]
    yield quantity(
        *("steps a second", "/s", runs, lambda run: run.mean("trained", "steps_per_second")),
        Goal(bound=0.99, of=LAUNCH, at_least=True),
        compared=compared,
    )
