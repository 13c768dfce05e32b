"""Shared by all benchmarks: run jobs side by side, measure time and memory from outside, compare, print.

A job is a small script in ``benchmarks/jobs`` that writes time stamps (see ``jobs/stamps.py``) to a file. It runs as
a child process with a time limit, in its own temporary directory. Sides alternate: in every pair
each side runs once, in reverse order every other time, so that other load on the machine affects all of them.
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
        launcher: arguments between the interpreter and the script, such as ``("-m", "torch.distributed.run")``.
        separator: arguments between the script and its options.
        environment: variables in addition to this process's.
        hold: measure the job's memory once this many workers have stamped ``held``; they wait until that is done.
        exit_code: the expected exit code.
        limit_s: seconds until it is killed.
    """

    script: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    launcher: Sequence[str] = ()
    separator: Sequence[str] = ()
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
    """The results of one run of a job. Times are Unix times in seconds."""

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
        """Return a number of each stamp that matches the conditions, in their order."""
        stamps = (stamp for stamp in self.named(name) if all(stamp.get(key) == value for key, value in where.items()))
        return [stamp[fact] for stamp in stamps]

    def last(self, name: str) -> float:
        """Return the time at which the last process reached a point."""
        return max(stamp["time"] for stamp in self.named(name))

    def first(self, name: str) -> float:
        return min(stamp["time"] for stamp in self.named(name))

    def mean(self, name: str, fact: str) -> float:
        """Return the mean over all processes of a number that they stamped."""
        return statistics.fmean(stamp[fact] for stamp in self.named(name))

    def pss(self, role: str) -> float:
        """Return PSS in MB (10^6 bytes): ``"all"``, the ``"driver"``, the mean ``"worker"``, or all but workers."""
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
    """A goal of the project: a bound on a median, or on the median of the paired ratios to a peer."""

    bound: float
    of: str = ""
    at_least: bool = False
    side: str = OURS

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(kw_only=True)
class Quantity:
    """One quantity measured on all sides, run by run; None for a failed run.

    Attributes:
        name: its name.
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
        unit = "" if goal.of else self.unit
        return {
            **{"side": goal.side, "goal": bound, "median": median, "met": met},
            **{"unit": unit, "summary": _summary(values)},
        }

    def results(self) -> dict[str, Any]:
        """Return the measured results by the name of the quantity and the goal, as they are recorded."""
        return {
            f"{self.name}: {goal['side']} {goal['goal']}": {**goal["summary"], "met": goal["met"], "unit": goal["unit"]}
            for goal in map(self._judge, self.goals)
            if goal["median"] is not None
        }

    def lines(self, previous: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
        """Yield the quantity as lines of text.

        Args:
            previous: earlier results, as :meth:`results` returns them.
        """
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
            earlier = previous.get(f"{self.name}: {goal['side']} {goal['goal']}")
            compared = f" (recorded: {_short(earlier['median'])})" if earlier else ""
            yield f"  goal: {goal['side']} {goal['goal']}: {_short(goal['median'])}, {verdict}{compared}"


class Bench:
    """Runs the jobs of one benchmark.

    Args:
        directory: the directory for all files that it writes.
        pairs: how many times each side runs.
        without: beginnings of the names of sides to leave out.
    """

    def __init__(self, directory: Path, pairs: int, without: Sequence[str] = ()) -> None:
        self.pairs = pairs
        self.commands: dict[str, str] = {}  # command -> the side that runs it
        self.failures: list[str] = []
        self.directory = directory
        self._without = tuple(without)
        self._count = 0
        # Processes whose parent has exited become children of this process, so leftovers of a job are detected.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._own: set[int] = {child.pid for child in psutil.Process().children()}

    def alternate(self, jobs: Mapping[str, Job]) -> dict[str, list[Run]]:
        """Run every side once per pair, and return the runs of each."""
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
        """Run one job to its end, or to its time limit, and kill the processes that it leaves running."""
        self._count += 1
        directory = self.directory / str(self._count)
        directory.mkdir(parents=True)
        stamps, release = directory / "stamps", directory / "release"
        command = [sys.executable, *job.launcher, str(JOBS / job.script), *job.separator, *job.options]
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
            how = "exceeded its time limit" if code is None else f"ended with exit code {code}"
            run.error = f"{job.script} {how}\n{_tail(directory / 'output')}"
        shutil.rmtree(directory / "storage", ignore_errors=True)
        return run

    @contextlib.contextmanager
    def ray_cluster(self, cpus: int) -> Iterator[str]:
        """Start a Ray cluster of one node that outlives the jobs, and yield its address."""
        stamps, log = self.directory / "cluster", self.directory / "cluster.log"
        command = [sys.executable, str(JOBS / "ray_cluster.py"), "--cpus", str(cpus), "--stamps", str(stamps)]
        with log.open("wb") as output, self._child(command, output, _environment(self.directory)) as child:
            if not child.wait_for(lambda: bool(_read_stamps(stamps)), time.monotonic() + _LIMIT_S):
                raise RuntimeError(f"Ray did not start\n{_tail(log)}")
            yield _read_stamps(stamps)[0]["address"]

    @contextlib.contextmanager
    def warm_server(self, script: str) -> Iterator[Mapping[str, str]]:
        """Keep the imports of a job in a warm server, and yield the variables that its runs require."""
        command = str(Path(sys.executable).with_name("drivetrain"))
        variables = {"RAY_TMPDIR": str(self.directory)}  # the same for all runs, which a server requires
        environment = _environment(self.directory, variables)

        def pids() -> set[int]:
            listed = subprocess.check_output([command, "warm", "status", "--json"], env=environment)
            return {server["pid"] for server in json.loads(listed)}

        before = pids()
        with (self.directory / "warm").open("wb") as output:  # of the same kind as that of the runs
            subprocess.run(
                [command, "warm", "start", str(JOBS / script)],
                env=environment,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        started = pids() - before
        self._own |= started
        try:
            yield variables
        finally:
            stop = [command, "warm", "stop", *map(str, started)]
            subprocess.run(stop, env=environment, check=True, stdout=subprocess.DEVNULL)
            self._own -= started
            self._end_orphans()

    @contextlib.contextmanager
    def s3_server(self, directory: Path) -> Iterator[S3Server]:
        """Start an S3 server over a directory, with an empty bucket named ``bucket``; the jobs require its environment.

        It has a lower priority than all others here (nice 19), to simulate a separate machine as far as possible.
        """
        with S3Server(directory, ["--etag-hash="]) as server:
            for thread in os.listdir(f"/proc/{server.pid}/task"):  # later threads inherit it
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
        """Return a job's processes: the driver, its descendants, and orphans."""
        roots = [psutil.Process(driver), *self._orphans()]
        return [process for root in roots for process in (root, *root.children(recursive=True))]

    def _orphans(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in self._own]

    def _end_orphans(self, patience_s: float = 5.0) -> int:
        """Wait briefly for leftover processes of a job, kill the rest, and return how many were killed."""
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
    """A process in its own session."""

    def __init__(self, command: Sequence[str], output: Any, environment: Mapping[str, str]) -> None:
        self.started = time.time()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, deadline: float) -> int | None:
        """Return the exit code as soon as it exits; None if it does not before the deadline."""
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
    """Read one number from every successful run; by default, compare each of our sides with each peer."""
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
    """Like :func:`quantity`, for jobs that measure something ``count`` times, possibly several sides in turn.

    Args:
        name: its name.
        unit: of the values.
        sides: the runs that have measured each side.
        read: returns the numbers that a run has measured for a side.
        goals: for any of the sides.
        count: the number of these numbers.
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
    """Return a quantity divided by a base that was measured in the same pairs."""
    values = {
        side: [None if None in (value, less) else value - less for value, less in zip(side_values, base, strict=True)]
        for side, side_values in found.values.items()
    }
    return Quantity(name=name, unit=found.unit, values=values, compared=(), goals=goals)


def machine() -> dict[str, Any]:
    """Return facts about this machine and the installed packages."""
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
    """A directory for all written files; its path is short, because Ray derives socket names from it."""
    with tempfile.TemporaryDirectory(prefix="dtb", ignore_cleanup_errors=True) as path:
        yield Path(path)


def _environment(directory: Path, extra: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(directory),  # separate from other clusters, and from the files of former ones
        "RAY_USAGE_STATS_ENABLED": "0",
        **extra,
    }


def _read_stamps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _count_held(path: Path) -> int:
    return sum(stamp["name"] == "held" for stamp in _read_stamps(path))


def _pss(process: psutil.Process) -> float:
    """The proportional set size in MB: private pages, and a share of the pages that others also map."""
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
