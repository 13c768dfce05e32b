"""report(checkpoint) to the local disk before it returns, compared with `cp -r` of the same directory; 1 worker.

The worker copies with cp and reports in turn, so that both use the same disk; Ray Train runs separately. All read from
the page cache, and the written files are deleted, and the disk idle, before the next one begins. One random effect
remains: if the pages that a copy is written to are new to the machine, the copy is several times slower, so use the
ratios. In the last case the directory is given away to drivetrain, on the filesystem of the storage.
"""

from collections.abc import Iterator

from benchmarks.files import GIB, KIB, MIB, make_files
from benchmarks.measure import Bench, Goal, Job, Quantity, Run, readings

PAIRS = 5
REPEATS = 3
SHAPES = {
    "1 GiB in a file": (1, GIB),
    "100 MiB in a file": (1, 100 * MIB),
    "10,000 files of 10 KiB": (10_000, 10 * KIB),
}
BOUNDS = {"1 GiB in a file": 1.05}


def measure(bench: Bench) -> Iterator[Quantity]:
    arguments = {"data": make_files(bench.directory / "data", SHAPES), "repeats": REPEATS}
    runs = bench.alternate(
        {
            "drivetrain": Job(script="saves_drivetrain.py", arguments=arguments, limit_s=300),
            "Ray Train": Job(script="saves_raytrain.py", arguments=arguments, limit_s=300),
        }
    )
    sides = {"drivetrain": runs["drivetrain"], "cp -r": runs["drivetrain"]}
    for shape in SHAPES:
        more = {"Ray Train": runs["Ray Train"]} if "Ray Train" in runs else {}
        yield readings(
            *(f"{shape}, report", "s", {**sides, **more}, lambda run, side, shape=shape: _values(run, side, shape)),
            *(Goal(bound=BOUNDS.get(shape, 1.1), of="cp -r"), Goal(bound=1.0, of="Ray Train")),
            count=REPEATS,
        )
    for shape in SHAPES:
        case = f"{shape}, given away"
        yield readings(
            *(f"{case}, report", "ms", {"drivetrain": runs["drivetrain"]}),
            lambda run, side, case=case: [value * 1e3 for value in _values(run, side, case)],
            Goal(bound=10),
            count=REPEATS,
        )


def _values(run: Run, side: str, case: str) -> list[float]:
    return run.facts("measured", "value", case=case, side=side)
