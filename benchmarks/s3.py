"""Upload and download of 1 GiB in a file and of 1,000 files of 1 MiB, by drivetrain and other S3 clients.

All files, the server's included, are in memory, and the server is on this machine, where it competes with its clients.
The commands (`aws s3 cp`, `s5cmd`) include their start, as for a user who types them; drivetrain and boto3 have
connected before. Each has its own defaults. drivetrain compares checksums when it downloads, the others do not; it is
also measured without that. The commands are searched next to Python, on PATH and in the directories of
DRIVETRAIN_BENCHMARK_PATH, which has the format of PATH; missing commands are left out.
"""

import importlib.util
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.files import GIB, MIB, make_files, memory
from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, Run, readings

PAIRS = 5
UNCHECKED = f"{OURS}, no checksums"
COMMANDS = {"aws s3 cp": "aws", "s5cmd": "s5cmd", "rclone": "rclone"}
SHAPES = {"1 GiB in a file": (1, GIB), "1,000 files of 1 MiB": (1000, MIB)}


def measure(bench: Bench) -> Iterator[Quantity]:
    clients = dict(_clients())
    with memory(6 * GIB) as directory, bench.s3_server(directory / "served") as server:
        work = directory / "work"
        work.mkdir()
        arguments = {
            **{"data": make_files(directory / "data", SHAPES), "work": work, "served": server.directory},
            **{"uri": server.uri("bucket"), "endpoint": server.endpoint},
        }
        jobs = {
            side: Job(script="transfers.py", arguments={**client, **arguments}, environment=server.environment)
            for side, client in clients.items()
        }
        runs = bench.alternate(jobs)
    for shape in SHAPES:
        for way in ("upload", "download"):
            yield _compare(f"{shape}, {way}", runs)


def _clients() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the arguments for each installed client."""
    yield OURS, {"client": "drivetrain"}
    yield UNCHECKED, {"client": "drivetrain_unchecked"}
    if importlib.util.find_spec("boto3"):
        yield "boto3", {"client": "boto3"}
    places = [str(Path(sys.executable).parent), os.environ["PATH"], os.environ.get("DRIVETRAIN_BENCHMARK_PATH", "")]
    for side, name in COMMANDS.items():
        if program := shutil.which(name, path=os.pathsep.join(places)):
            yield side, {"client": name, "program": program}
        else:
            print(f"  {side} is not installed, so it is left out")


def _compare(case: str, runs: Mapping[str, Sequence[Run]]) -> Quantity:
    def read(run: Run, side: str) -> list[float]:
        return [GIB / 1e6 / value for value in run.facts("measured", "value", case=case)]

    found = readings(case, "MB/s", runs, read, count=1, compared=())
    peers = [side for side in runs if not side.startswith(OURS) and found.known(side)]
    if peers:
        fastest = max(peers, key=lambda side: statistics.median(found.known(side)))
        found.compared = [(mine, fastest) for mine in (OURS, UNCHECKED)]
        found.goals = [Goal(bound=0.95, of=fastest, at_least=True)]
    return found
