"""The time of a loader of prepare_data_loader over that of a plain DataLoader, in batches of 32 rows of 2 workers.

The plain loader has a DistributedSampler. Both read the same rows in the same order. One train function reads an epoch
of each in turn, so that other load on the machine affects both. Without loader processes, the CPU time of the worker is
less noisy than the clock. With them, most of the work is done in other processes, and only the clock shows it.
"""

from collections.abc import Iterator

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, readings

PAIRS = 3
EPOCHS = {0: 40, 2: 16}
"""The epochs of both sides by the number of loader processes, which take longer."""
PLAIN = "DataLoader"


def measure(bench: Bench) -> Iterator[Quantity]:
    for processes, epochs in EPOCHS.items():
        job = Job(script="loads_drivetrain.py", arguments={"epochs": epochs, "processes": processes})
        runs = bench.alternate({OURS: job})
        sides = {OURS: runs[OURS], PLAIN: runs[OURS]}
        for name, fact in (("CPU time", "cpu_seconds"), ("time", "seconds")):
            yield readings(
                *(f"{name} of an epoch, {processes} loader processes", "s", sides),
                lambda run, side, fact=fact: run.facts("read", fact, prepared=side == OURS),
                *([Goal(bound=1.02, of=PLAIN)] if fact == "seconds" or not processes else []),
                count=epochs // 2,
                compared=[(OURS, PLAIN)],
            )
