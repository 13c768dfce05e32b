"""The maximum memory growth of a worker while it stores a checkpoint of 1 GiB, on the disk or on S3.

This is the peak minus the value before the report, sampled every 5 ms, of the process's own memory: resident
pages except those of files, cached or mapped. Each case has its own worker, which stores its first checkpoint:
one-time allocations count. The files are in memory, and so on a different filesystem than the temporary directory.
"""

import shutil
from collections.abc import Iterator

from benchmarks.files import GIB, MIB, make_files, memory
from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, quantity

PAIRS = 3
SHAPES = {"1 GiB in a file": (1, GIB), "1,000 files of 1 MiB": (1000, MIB)}


def measure(bench: Bench) -> Iterator[Quantity]:
    with memory(6 * GIB) as directory:
        data = make_files(directory / "data", SHAPES)
        for shape in SHAPES:
            for mode in ("sync", "async"):
                arguments = {"data": data / shape, "mode": mode}
                local = Job(script="uploads_weighed.py", arguments=arguments)
                served = directory / "served"
                with bench.s3_server(served) as server:
                    remote = Job(
                        script="uploads_weighed.py",
                        arguments={**arguments, "uri": server.uri("bucket/runs")},
                        environment=server.environment,
                    )
                    jobs = {f"{OURS}, to the disk": local, f"{OURS}, to S3": remote}
                    runs = bench.alternate(jobs)
                shutil.rmtree(served)
                yield quantity(
                    *(f"peak over before, {shape}, {mode}", "MB", runs, lambda run: run.mean("weighed", "grown_mb")),
                    *(Goal(bound=64 * MIB / 1e6, side=side) for side in jobs),
                )
