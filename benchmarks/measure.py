"""What all benchmarks share: run jobs side by side, time and weigh them from outside, compare, print.

A job is a small script in ``benchmarks/jobs`` that writes time stamps (see ``jobs/stamps.py``) to a file. It runs as
a child process with a time limit, in a directory of its own under a temporary one. Sides alternate: in every pair
each side runs once, in turned order every other time, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.s3 import S3Server

OURS = "drivetrain"
JOBS = Path(__file__).parent / "jobs"

_PR_SET_CHILD_SUBREAPER = 36
_END_WAIT_S = 20.0
_POLL_S = 0.02
_LIMIT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One side of a comparison.

    Attributes:
        script: its file in ``benchmarks/jobs``.
        arguments: its options.
        launcher: what stands between the interpreter and the script, such as ``("-m", "torch.distributed.run")``.
        environment: variables on top of this process's.
        hold: weigh the job's processes once this many workers have stamped ``held``; they wait until it is done.
        exit_code: how it is to end.
        limit_s: seconds until it is killed.
    """

    script: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    launcher: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    hold: int = 0
    exit_code: int = 0
    limit_s: float = _LIMIT_S

    @property
    def options(self) -> list[str]:
        return [part for name, value in self.arguments.items() for part in (f"--{name}", str(value))]

    @property
    def shown(self) -> str:
        """The command as a person would type it."""
        variables = [f"{name}=..." for name in self.environment]
        return " ".join([*variables, "python", *self.launcher, f"benchmarks/jobs/{self.script}", *self.options])


@dataclass(kw_only=True)
class Run:
    """What one run of a job left. Times are Unix times in seconds."""

    started: float
    ended: float = 0.0
    stamps: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)
    driver: int = 0
    left_behind: int = 0
    error: str = ""

    def named(self, name: str) -> list[dict[str, Any]]:
        return [stamp for stamp in self.stamps if stamp["name"] == name]

    def facts(self, name: str, fact: str, **where: object) -> list[float]:
        """A number of each stamp that says what is asked for, in their order."""
        stamps = (stamp for stamp in self.named(name) if all(stamp.get(key) == value for key, value in where.items()))
        return [stamp[fact] for stamp in stamps]

    def last(self, name: str) -> float:
        """When the last process came to a point."""
        return max(stamp["time"] for stamp in self.named(name))

    def first(self, name: str) -> float:
        return min(stamp["time"] for stamp in self.named(name))

    def mean(self, name: str, fact: str) -> float:
        """The mean over all processes of a number they stamped."""
        return statistics.fmean(stamp[fact] for stamp in self.named(name))

    def pss(self, role: str) -> float:
        """PSS in MB (10^6 bytes) of ``"all"`` processes, the ``"driver"``, the mean ``"worker"``, all but workers."""
        workers = {stamp["pid"] for stamp in self.named("held")}
        if role == "worker":
            return statistics.fmean(pss for pid, pss in self.memory if pid in workers)
        chosen = {
            "all": lambda pid: True,
            "driver": lambda pid: pid == self.driver,
            "control plane": lambda pid: pid not in workers,
        }[role]
        return sum(pss for pid, pss in self.memory if chosen(pid))


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the project sets itself: a bound on a median, or on the median of the paired ratios to a peer."""

    bound: float
    of: str = ""
    at_least: bool = False
    side: str = OURS

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(kw_only=True)
class Quantity:
    """One thing measured on all sides, run by run; None where a run failed.

    Attributes:
        name: what it is.
        unit: of the values.
        values: by side.
        compared: the pairs of sides to take ratios of.
        goals: for any of the sides.
    """

    name: str
    unit: str
    values: dict[str, list[float | None]]
    compared: Sequence[tuple[str, str]]
    goals: Sequence[Goal] = ()

    def known(self, side: str) -> list[float]:
        return [value for value in self.values.get(side, ()) if value is not None]

    def ratios(self, ours: str, peer: str) -> list[float]:
        pairs = zip(self.values.get(ours, ()), self.values.get(peer, ()), strict=False)
        return [mine / theirs for mine, theirs in pairs if mine is not None and theirs]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "values": self.values,
            "sides": {side: _summary(self.known(side)) for side in self.values},
            "ratios": {f"{mine} / {peer}": _summary(self.ratios(mine, peer)) for mine, peer in self.compared},
            "goals": [self._judge(goal) for goal in self.goals],
        }

    def _judge(self, goal: Goal) -> dict[str, Any]:
        values = self.ratios(goal.side, goal.of) if goal.of else self.known(goal.side)
        median = statistics.median(values) if values else None
        bound = f"at {'least' if goal.at_least else 'most'} {goal.bound:g} {(goal.of and f'x {goal.of}') or self.unit}"
        met = None if median is None else goal.met(median)
        return {"side": goal.side, "goal": bound, "median": median, "met": met}

    def lines(self) -> Iterator[str]:
        """The quantity as text."""
        facts = self.as_dict()
        width = max(map(len, [*facts["sides"], *facts["ratios"]]))
        yield f"{self.name} [{self.unit}]"
        for kind, unit in (("sides", ""), ("ratios", " (paired ratios)")):
            for name, summary in facts[kind].items():
                if not summary["runs"]:
                    yield f"  {name:{width}}  no run succeeded"
                    continue
                numbers = "  ".join(f"{key} {_short(summary[key]):>8}" for key in ("median", "min", "max"))
                yield f"  {name:{width}}  runs {summary['runs']}  {numbers}{unit}"
        for goal in facts["goals"]:
            verdict = {True: "met", False: "NOT met", None: "not measured"}[goal["met"]]
            yield f"  goal: {goal['side']} {goal['goal']}: {_short(goal['median'])}, {verdict}"


class Bench:
    """Runs the jobs of one benchmark.

    Args:
        directory: where everything it writes goes.
        pairs: how many times each side runs.
        without: beginnings of the names of sides to leave out.
    """

    def __init__(self, directory: Path, pairs: int, without: Sequence[str] = ()) -> None:
        self.pairs = pairs
        self.commands: dict[str, str] = {}  # to the side that runs it
        self.failures: list[str] = []
        self.directory = directory
        self._without = tuple(without)
        self._count = 0
        # Processes whose parent has ended become ours, so that none that a job leaves behind goes unnoticed.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._own: set[int] = {child.pid for child in psutil.Process().children()}

    def alternate(self, jobs: Mapping[str, Job]) -> dict[str, list[Run]]:
        """Runs every side once a pair, and returns the runs of each."""
        jobs = {side: job for side, job in jobs.items() if not side.startswith(self._without)}
        for side, job in jobs.items():
            self.commands.setdefault(job.shown, side)
        runs: dict[str, list[Run]] = {side: [] for side in jobs}
        for pair in range(self.pairs):
            for side in list(jobs) if pair % 2 == 0 else reversed(jobs):
                run = self.run(jobs[side])
                runs[side].append(run)
                outcome = run.error or f"{run.ended - run.started:.2f} s"
                if run.left_behind:
                    outcome = f"left {run.left_behind} processes running; {outcome}"
                if run.left_behind or run.error:
                    self.failures.append(f"pair {pair + 1}, {side}: {outcome}")
                print(f"  . pair {pair + 1}, {side}: {outcome.splitlines()[0]}", flush=True)
        return runs

    def run(self, job: Job) -> Run:
        """Runs one job to its end, or to its time limit, and ends whatever it leaves running."""
        self._count += 1
        directory = self.directory / str(self._count)
        directory.mkdir(parents=True)
        stamps, release = directory / "stamps", directory / "release"
        command = [sys.executable, *job.launcher, str(JOBS / job.script), *job.options]
        command += ["--stamps", str(stamps), "--storage", str(directory / "storage")]
        if job.hold:
            command += ["--hold", str(release)]
        with (
            (directory / "output").open("wb") as output,
            self._child(command, output, _environment(directory, job.environment)) as child,
        ):
            run = Run(started=child.started, driver=child.pid)
            deadline = time.monotonic() + job.limit_s
            if job.hold and child.wait_for(lambda: _count_held(stamps) >= job.hold, deadline):
                run.memory = [(process.pid, _pss(process)) for process in self._processes(child.pid)]
                release.touch()
            code = child.wait(deadline)
            run.ended = time.time()
            run.left_behind = self._end_orphans()
        run.stamps = _read_stamps(stamps)
        if code != job.exit_code:
            how = "took more than its time" if code is None else f"ended with exit code {code}"
            run.error = f"{job.script} {how}\n{_tail(directory / 'output')}"
        shutil.rmtree(directory / "storage", ignore_errors=True)
        return run

    @contextlib.contextmanager
    def ray_cluster(self, cpus: int) -> Iterator[str]:
        """A Ray cluster of one node that outlives the jobs, and its address."""
        stamps, log = self.directory / "cluster", self.directory / "cluster.log"
        command = [sys.executable, str(JOBS / "ray_cluster.py"), "--cpus", str(cpus), "--stamps", str(stamps)]
        with log.open("wb") as output, self._child(command, output, _environment(self.directory)) as child:
            if not child.wait_for(lambda: bool(_read_stamps(stamps)), time.monotonic() + _LIMIT_S):
                raise RuntimeError(f"Ray did not start\n{_tail(log)}")
            yield _read_stamps(stamps)[0]["address"]

    @contextlib.contextmanager
    def s3_server(self, directory: Path) -> Iterator[S3Server]:
        """An S3 server over a directory, with an empty bucket named ``bucket``; the jobs want its environment.

        It gives way to all others here (nice 19), as if it were a machine of its own, as far as it can.
        """
        with S3Server(directory, ["--etag-hash="]) as server:
            for thread in os.listdir(f"/proc/{server.pid}/task"):  # those it starts later inherit it
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)
            server.make_bucket("bucket")
            self._own.add(server.pid)
            yield server
        self._own.discard(server.pid)

    @contextlib.contextmanager
    def _child(self, command: Sequence[str], output: Any, environment: Mapping[str, str]) -> Iterator[_Child]:
        child = _Child(command, output, environment)
        self._own.add(child.pid)
        try:
            yield child
        finally:
            child.kill()
            self._own.discard(child.pid)
            self._end_orphans(patience_s=0)

    def _processes(self, driver: int) -> list[psutil.Process]:
        """A job's processes: the driver, what it started, and what has lost its parent."""
        roots = [psutil.Process(driver), *self._orphans()]
        return [process for root in roots for process in (root, *root.children(recursive=True))]

    def _orphans(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in self._own]

    def _end_orphans(self, patience_s: float = 5.0) -> int:
        """Waits a moment for what a job has left running, kills the rest, and returns how many those were."""
        deadline = time.monotonic() + patience_s
        killed = set()
        while orphans := [orphan for orphan in self._orphans() if not _reaped(orphan.pid)]:
            if time.monotonic() > deadline:
                for orphan in orphans:
                    killed.add(orphan.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        orphan.kill()
            time.sleep(_POLL_S)
        return len(killed)


class _Child:
    """A process in a session of its own."""

    def __init__(self, command: Sequence[str], output: Any, environment: Mapping[str, str]) -> None:
        self.started = time.time()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, deadline: float) -> int | None:
        """The exit code, the moment it ends; None if that is not before the deadline."""
        ready, _, _ = select.select([self._pidfd], [], [], max(0.0, deadline - time.monotonic()))
        return self._process.wait() if ready else None

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        while time.monotonic() < deadline and self._process.poll() is None:
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM if self._process.poll() is None else signal.SIGKILL)
        if self.wait(time.monotonic() + _END_WAIT_S) is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._pidfd)


def quantity(
    name: str,
    unit: str,
    runs: Mapping[str, Sequence[Run]],
    read: Callable[[Run], float],
    *goals: Goal,
    compared: Sequence[tuple[str, str]] | None = None,
) -> Quantity:
    """Reads one number from every run that succeeded; compares each of our sides with each peer, if not told which."""
    if compared is None:
        ours = [side for side in runs if side.startswith(OURS)]
        compared = [(mine, peer) for mine in ours for peer in runs if peer not in ours]
    values = {side: [None if run.error else read(run) for run in found] for side, found in runs.items()}
    return Quantity(name=name, unit=unit, values=values, compared=compared, goals=goals)


def readings(
    name: str,
    unit: str,
    sides: Mapping[str, Sequence[Run]],
    read: Callable[[Run, str], Sequence[float]],
    *goals: Goal,
    count: int,
    compared: Sequence[tuple[str, str]] | None = None,
) -> Quantity:
    """Like :func:`quantity`, for jobs that measure something ``count`` times, and maybe several sides in turn.

    Args:
        name: what it is.
        unit: of the values.
        sides: the runs that have measured each side.
        read: the numbers that a run has found for a side.
        goals: for any of the sides.
        count: how many numbers those are.
        compared: the pairs of sides to take ratios of; None for each of ours with each peer.
    """
    values: dict[str, list[float | None]] = {}
    for side, runs in sides.items():
        values[side] = []
        for run in runs:
            found = [] if run.error else list(read(run, side))
            assert run.error or len(found) == count, f"{name}: {side}: expected {count} numbers, got {found}"
            values[side] += found or [None] * count
    if compared is None:
        compared = [(OURS, side) for side in sides if not side.startswith(OURS)]
    return Quantity(name=name, unit=unit, values=values, compared=compared, goals=goals)


def over(found: Quantity, name: str, base: Sequence[float | None], *goals: Goal) -> Quantity:
    """What a quantity is over a base, which was measured in the same pairs."""
    values = {
        side: [None if None in (value, less) else value - less for value, less in zip(side_values, base, strict=True)]
        for side, side_values in found.values.items()
    }
    return Quantity(name=name, unit=found.unit, values=values, compared=(), goals=goals)


def machine() -> dict[str, Any]:
    """Facts about this machine and what is installed on it."""
    names = ("drivetrain", "drivetrain-torch", "torch", "lightning", "ray", "pyarrow")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": ?")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model.split(":", 1)[1].strip(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "load_average": os.getloadavg(),
    }


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for everything that is written; short, because Ray makes socket names of it."""
    with tempfile.TemporaryDirectory(prefix="dtb", ignore_cleanup_errors=True) as path:
        yield Path(path)


def _environment(directory: Path, extra: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(directory),  # keeps away from other clusters, and from the traces of ended ones
        "RAY_USAGE_STATS_ENABLED": "0",
        **extra,
    }


def _read_stamps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _count_held(path: Path) -> int:
    return sum(stamp["name"] == "held" for stamp in _read_stamps(path))


def _pss(process: psutil.Process) -> float:
    """The proportional set size in MB: private pages, and a share of those that others map as well."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _summary(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"runs": 0}
    return {"runs": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
