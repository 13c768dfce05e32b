"""The time that report(checkpoint, "async") blocks, and the speed of training during the upload; 1 worker.

A given-away directory is moved if it stays on one filesystem. Otherwise the files are copied before the train function
can continue, so the relevant number is how much longer than `cp -r` a report takes; both run in turn. The steps
are those of a small network, with one thread. They are counted while 1 GiB, given away on the disk, is stored in memory
or on S3, and just before and after. The S3 server, which would run elsewhere, has a lower priority than all others here
(nice 19). Ray Train makes no copy: the directory must not change until its upload is done.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.files import GIB, MIB, make_files, memory
from benchmarks.measure import Bench, Goal, Job, Quantity, Run, quantity, readings

PAIRS = 5
REPEATS = 3
UPLOADS = 2
SHAPES = {"100 MiB": (1, 100 * MIB), "1,000 files of 10 KiB": (1000, 10_240)}
COPIED = ("given away, other filesystem", "kept, other filesystem", "kept, same filesystem")


def measure(bench: Bench) -> Iterator[Quantity]:
    with memory(4 * GIB) as directory:
        disk = make_files(bench.directory / "data", SHAPES)
        files = make_files(directory / "data", SHAPES)
        arguments = {"disk": disk, "memory": files, "repeats": REPEATS}
        runs = bench.alternate(
            {"drivetrain": Job(script="saves_async_drivetrain.py", arguments=arguments, limit_s=300)}
        )
        for shape in SHAPES:
            case = f"{shape}, moved"
            yield readings(
                *(f"report blocks: {shape} given away, same filesystem", "ms", runs),
                lambda run, side, case=case: [value * 1e3 for value in _values(run, side, case)],
                Goal(bound=5),
                count=REPEATS,
            )
        for shape in SHAPES:
            for case in COPIED:
                yield _beyond_copy(runs["drivetrain"], f"report blocks: {shape} {case}", f"{shape}, {case}")
        yield from _measure_steps(bench, directory)


def _beyond_copy(runs: list[Run], name: str, case: str) -> Quantity:
    sides = {"report": runs, "cp -r": runs, "drivetrain, report beyond cp -r": runs}

    def read(run: Run, side: str) -> list[float]:
        found = {name: [value * 1e3 for value in _values(run, name, case)] for name in ("drivetrain", "cp -r")}
        if side == "cp -r":
            return found[side]
        pairs = zip(found["drivetrain"], found["cp -r"], strict=True)
        return found["drivetrain"] if side == "report" else [report - copy for report, copy in pairs]

    goal = Goal(bound=5, side="drivetrain, report beyond cp -r")
    return readings(name, "ms", sides, read, goal, count=REPEATS, compared=[("report", "cp -r")])


def _values(run: Run, side: str, case: str) -> list[float]:
    return run.facts("measured", "value", case=case, side=side)


def _measure_steps(bench: Bench, directory: Path) -> Iterator[Quantity]:
    data = make_files(bench.directory / "big", {"files": (1, GIB)}) / "files"
    given = bench.directory / "given"
    given.mkdir()
    arguments = {"data": data, "give": given, "repeats": UPLOADS}
    to_memory = {**arguments, "uri": directory / "runs"}
    with bench.s3_server(directory / "served") as server:
        to_s3 = {**arguments, "uri": server.uri("bucket/runs"), "served": server.directory}
        runs = bench.alternate(
            {
                "drivetrain, to memory": Job(script="steps_saving_drivetrain.py", arguments=to_memory),
                "drivetrain, to S3": Job(
                    script="steps_saving_drivetrain.py", arguments=to_s3, environment=server.environment
                ),
                "Ray Train, to memory": Job(script="steps_saving_raytrain.py", arguments=to_memory),
            }
        )
    ours, peers = [side for side in runs if side.startswith("drivetrain")], ("Ray Train, to memory",)
    compared = [(side, peer) for side in ours for peer in peers if peer in runs]
    yield readings(
        *("steps a second during an upload, over those without", "", runs),
        lambda run, side: [stamp["during"] / stamp["alone"] for stamp in run.named("trained")],
        *(Goal(bound=0.95, at_least=True, side=side) for side in ours),
        count=UPLOADS,
        compared=compared,
    )
    for name, unit, fact in (
        ("steps without an upload", "/s", "alone"),
        ("report blocks while it trains: 1 GiB given away, on the disk", "ms", "report_ms"),
        ("upload while it trains: 1 GiB", "s", "upload_s"),
    ):
        yield quantity(name, unit, runs, lambda run, fact=fact: run.mean("trained", fact), compared=compared)
