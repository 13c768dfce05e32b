"""The control plane with many workers without a framework, 100 reports each: start, reports, memory.

The cost per worker must not grow with their number, so every total is divided by it. The cost of a report
is its share of the time from the first worker's start to the last one's last report, which is the driver's work as
long as it is slower than the workers together. Memory is PSS when every worker has reported: of the driver, and of all
other processes that are not workers.
"""

from collections.abc import Iterator

from benchmarks.measure import Bench, Job, Quantity, Run, quantity

PAIRS = 3
LOCAL, RAY = (8, 16, 32, 64), (8, 16, 32)
REPORTS, PEER_REPORTS = 100, 2
CPUS = 0.05


def measure(bench: Bench) -> Iterator[Quantity]:
    ours, peer = f"drivetrain, ray, {RAY[-1]} workers", f"Ray Train, {RAY[-1]} workers"
    jobs = {
        **{f"drivetrain, local, {n} workers": _job("drivetrain", n, REPORTS, runtime="local") for n in LOCAL},
        **{f"drivetrain, ray, {n} workers": _job("drivetrain", n, REPORTS, runtime="ray") for n in RAY},
        peer: _job("raytrain", RAY[-1], PEER_REPORTS),
    }
    runs = bench.alternate(jobs)
    for name, unit, read in (
        ("fit() -> all train functions, per worker", "s", lambda run: _start_s(run) / len(run.named("held"))),
        ("fit() -> all train functions", "s", _start_s),
        ("report, mean call", "us", lambda run: run.mean("reported", "mean_us")),
        ("time per report of any worker", "us", _report_us),
        ("last return -> fit() returns", "s", lambda run: run.last("fit_ended") - run.last("leaving")),
        ("driver", "MB", lambda run: run.pss("driver")),
        ("control plane: everything but the workers", "MB", lambda run: run.pss("control plane")),
        ("a worker", "MB", lambda run: run.pss("worker")),
    ):
        yield quantity(name, unit, runs, read, compared=[(ours, peer)])


def _job(side: str, workers: int, reports: int, **more: object) -> Job:
    return Job(
        script=f"reports_{side}.py",
        arguments={"workers": workers, "cpus": CPUS, "reports": reports, **more},
        hold=workers,
        limit_s=300,
    )


def _start_s(run: Run) -> float:
    return run.last("train_function") - run.last("fit_called")


def _report_us(run: Run) -> float:
    reported = run.named("reported")
    seconds = run.last("reported") - run.first("train_function")
    return seconds / (len(reported) * reported[0]["reports"]) * 1e6
