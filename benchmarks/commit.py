"""The commit of a small checkpoint, after its upload: on the local disk, on S3, and the 1,000th of a run.

Each job makes its commits one after the other in one process. A commit replaces one file durably, the manifest.
The floor does that with the same bytes after each commit: write, fsync, rename, fsync of the directory; on S3 one put
with boto3. The S3 server is on this machine, so the latencies are those of client and server without a network.
"""

import statistics
from collections.abc import Iterator

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, Run, readings

PAIRS = 5
COMMITS, EDGE, ON_S3 = 1000, 50, 50
FLOOR, PUT = "a durable write", "put by boto3"
FIRST, LAST = f"commits 1 to {EDGE}", f"commits {COMMITS - EDGE + 1} to {COMMITS}"
EDGES = {FIRST: slice(EDGE), LAST: slice(-EDGE, None)}


def measure(bench: Bench) -> Iterator[Quantity]:
    local = bench.alternate({OURS: Job(script="commits.py", arguments={"commits": COMMITS})})[OURS]
    yield _compare("commit, local disk", local, FLOOR, Goal(bound=3))
    for name, what, *goals in (
        ("commit, local disk", "commits", Goal(bound=1.3, of=FIRST, side=LAST)),
        ("a durable write of the manifest's bytes", "floor"),
    ):
        yield readings(
            *(f"{name}, median", "ms", {LAST: local, FIRST: local}),
            lambda run, side, what=what: [_median_ms(_of(run, what)[EDGES[side]])],
            *goals,
            count=1,
            compared=[(LAST, FIRST)],
        )
    with bench.s3_server(bench.directory / "served") as server:
        arguments = {"uri": server.uri("bucket/RUN"), "endpoint": server.endpoint, "commits": ON_S3}
        job = Job(script="commits.py", arguments=arguments, environment=server.environment)
        remote = bench.alternate({OURS: job})[OURS]
    yield _compare("commit, S3", remote, PUT)
    yield _compare("the manifest's put, S3", remote, PUT, what="manifest")


def _compare(name: str, runs: list[Run], floor: str, *goals: Goal, what: str = "commits") -> Quantity:
    return readings(
        *(f"{name}, median", "ms", {OURS: runs, floor: runs}),
        lambda run, side: [_median_ms(_of(run, what if side == OURS else "floor"))],
        *goals,
        count=1,
    )


def _of(run: Run, what: str) -> list[float]:
    (stamp,) = run.named("committed")
    return stamp[what]


def _median_ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3
