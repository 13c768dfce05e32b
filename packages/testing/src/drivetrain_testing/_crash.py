"""The crash harness: kill a job's processes at critical moments, and check that the results are unaffected.

A crash is a ``kill -9`` of the driver, of one worker, of all workers or of all processes, when the storage protocol
reaches a named point (:data:`POINTS`) or after some seconds. After each crash, all committed checkpoints must be
intact, and the next start must resume from the newest one. At the end, the metrics files and the last checkpoint must
equal those of an undisturbed run. Nothing may be left over: no uncommitted checkpoint, no draft of a file, no local
copy and no process.

In a test::

    from drivetrain_testing import CrashHarness

    def test_my_job_survives(tmp_path):
        harness = CrashHarness(tmp_path, command=[sys.executable, "train.py"])
        harness.crash_at("during manifest write", victim="driver")
        harness.crash_after(2.5, victim="both")

On the command line, here with the default job on your own storage::

    python -m drivetrain_testing._crash --random 200 --storage-path s3://bucket/crashes

Without a ``command``, the harness runs :mod:`drivetrain_testing._crashjob`, which is also a template for other jobs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain import CheckpointError, StorageError
from drivetrain.plugin.callbacks import CommittedCheckpoint
from drivetrain.plugin.checks import POINTS
from drivetrain.plugin.files import LISTING_FILE, METADATA_FILE, PENDING, PIN_FILE, parse_listing
from drivetrain.plugin.storage import Storage, checkpoint_in, locate, read_manifest
from drivetrain_testing._crashstart import VICTIMS, Crash, JobSpec, JobStart

__all__ = ["POINTS", "VICTIMS", "Crash", "CrashFound", "CrashHarness", "CrashReport", "main"]

_STORAGE = "DRIVETRAIN_STORAGE_PATH"
_WITHOUT_WORKERS = ("during sweep",)
_LOCAL_STEPS = 60
_REMOTE_STEPS = 8
_ITERATION = "_training_iteration"
_CONTINUES = re.compile(r"resume=.* (?:(?:continues|resumes) from ([^\s(]+)|starts from the beginning)")
_DAMAGE = re.compile(r"is damaged|left unchanged|cannot delete a dropped checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashReport:
    """The results of a run with crashes.

    Attributes:
        crashes: the requested crashes.
        killed: the number of processes that each crash killed; 0 if the run ended before the crash.
        findings: descriptions of the problems.
        starts: number of times that the job was started.
        directory: the directory with the output of each start; deleted unless there are findings.
        storage_path: the path or URI of the directory that contains the run; deleted unless there are findings.
    """

    crashes: tuple[Crash, ...]
    killed: tuple[int, ...]
    findings: tuple[str, ...]
    starts: int
    directory: Path
    storage_path: str

    def __str__(self) -> str:
        crashes = ", then ".join(map(str, self.crashes)) or "undisturbed"
        where = [f"output: {self.directory}", f"run: {self.storage_path}"] if self.findings else []
        return "\n  ".join(
            [f"{crashes}: {len(self.findings)} findings in {self.starts} starts", *self.findings, *where]
        )


class CrashFound(AssertionError):
    """The result of a run with crashes differs from that of an undisturbed run, or something is left over.

    Attributes:
        report: the report with the findings.
    """

    def __init__(self, report: CrashReport) -> None:
        super().__init__(str(report))
        self.report = report


class CrashHarness:
    """Crashes runs of a job, each in its own directory, and compares them with an undisturbed run.

    The job must be deterministic and use the local runtime. Its run must have a fixed name and be stored in
    ``DRIVETRAIN_STORAGE_PATH``, as is the default if the job sets no ``storage_path``. The job must set
    ``resume="auto"``, a ``verbose`` of at least 1, and a ``max_failures`` that allows for the killed workers.

    Args:
        directory: the directory for the job's output and temporary files. If ``storage_path`` is None, it also contains
            the job's runs.
        storage_path: the path or URI for the job's runs. Credentials are taken from this process's environment.
        command: the command that starts the job and becomes the driver process; None for the module
            ``drivetrain_testing._crashjob``.
        name: the ``RunConfig(name=...)`` of the job.
        environment: environment variables of the job in addition to those of this process.
        metrics: the names of the metrics that must be the same as in an undisturbed run; None for all metrics whose
            names do not start with an underscore.
        same_files: True if the files of the last checkpoint must be the same as in an undisturbed run.
        deadline_s: maximum duration of one start of the job in seconds.

    Example:
        >>> import tempfile
        >>> harness = CrashHarness(tempfile.mkdtemp())
        >>> report = harness.crash_at("mid-file", victim="worker", occurrence=3)
        >>> report.killed, report.findings
        ((1,), ())
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        storage_path: str | os.PathLike[str] | None = None,
        command: Sequence[str] | None = None,
        name: str = "run",
        environment: Mapping[str, str] | None = None,
        metrics: Sequence[str] | None = None,
        same_files: bool = True,
        deadline_s: float = 60.0,
    ) -> None:
        self._directory = Path(directory).absolute()
        path = os.fspath(storage_path) if storage_path is not None else str(self._directory / "storage")
        self._job = JobSpec(
            command=tuple(command or _own_command(path)),
            environment=dict(environment or {}),
            storage_path=path if "://" in path else os.path.abspath(path),
            name=name,
            metrics=None if metrics is None else frozenset(metrics),
            same_files=same_files,
            deadline_s=deadline_s,
        )
        self._token = secrets.token_hex(3)
        self._cases = 0
        self._seconds = 0.0
        self._undisturbed: _Outcome | None = None

    @property
    def duration_s(self) -> float:
        """Seconds that the last undisturbed run took. If there has been none, the job is run once to measure them."""
        self._reference()
        return self._seconds

    def crash_at(self, point: str, victim: str = "driver", *, occurrence: int = 1) -> CrashReport:
        """Run the job, kill processes at a point of the storage protocol, and check the results.

        For ``"during sweep"``, the driver is first killed after an upload, so that there is something to sweep.

        Args:
            point: one of :data:`POINTS`.
            victim: one of :data:`VICTIMS`.
            occurrence: kill when the point is reached for the n-th time, counted over all processes from 1.

        Returns:
            A report without findings.

        Raises:
            CrashFound: there are findings.
        """
        crash = Crash(victim, point=point, occurrence=occurrence)
        if point == "during sweep":
            return self.crash(Crash("driver", point="after upload", occurrence=occurrence), Crash(victim, point=point))
        return self.crash(crash)

    def crash_after(self, seconds: float, victim: str = "driver") -> CrashReport:
        """Run the job, kill processes some time after its start, and check the results.

        Args:
            seconds: the time after the start in seconds.
            victim: one of :data:`VICTIMS`.

        Returns:
            A report without findings.

        Raises:
            CrashFound: there are findings.
        """
        return self.crash(Crash(victim, after_s=seconds))

    def crash(self, *crashes: Crash) -> CrashReport:
        """Start the job, crash it, restart it until it ends undisturbed, and check the results.

        Args:
            crashes: the crashes, in this order. After a crash that kills the driver, the job is restarted, and the next
                crash happens in that new start. After any other crash, the next one happens in the same start.

        Returns:
            A report without findings.

        Raises:
            CrashFound: there are findings. The files of the run are kept.
        """
        reference = self._reference()
        self._cases += 1
        case = _Case(self._job, self._directory, f"case_{self._cases:04d}_{self._token}")
        case.run_until_undisturbed(crashes, reference)
        self._seconds = case.undisturbed_s or self._seconds
        return case.close(crashes)

    def _reference(self) -> _Outcome:
        if self._undisturbed is None:
            case = _Case(self._job, self._directory, f"undisturbed_{self._token}")
            outcome = case.run_until_undisturbed((), None)
            case.close(())
            assert outcome is not None
            self._undisturbed, self._seconds = outcome, case.undisturbed_s
        return self._undisturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """The results of a run.

    Attributes:
        names: the names of the files and directories in the run directory, except those of committed checkpoints.
        iteration: the iteration of the last checkpoint; None without checkpoints.
        tables: the rows of each metrics file, by its name, with only the metrics that must be the same in every run.
        files: the checksum of each file of the last checkpoint, by its path.
    """

    names: frozenset[str]
    iteration: int | None
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    files: Mapping[str, str]


class _Case:
    """One run of the job, from its first start to its undisturbed end."""

    def __init__(self, job: JobSpec, directory: Path, name: str) -> None:
        self.undisturbed_s = 0.0
        """Seconds that the first start took, if it was undisturbed."""
        self._job = job
        self._directory = directory / name
        self._temporary = self._directory / "tmp"
        self._temporary.mkdir(parents=True)
        self._storage_path = _join(job.storage_path, name)
        self._storage = Storage(*locate(_join(self._storage_path, job.name), what="CrashHarness(storage_path=...)"))
        self._starts: list[JobStart] = []
        self._killed: list[int] = []
        self._findings: list[str] = []

    def run_until_undisturbed(self, crashes: Sequence[Crash], reference: _Outcome | None) -> _Outcome | None:
        """Start the job again and again, until all crashes have happened and it has ended undisturbed.

        Stop early if there are findings.
        """
        pending = deque(crashes)
        newest: CommittedCheckpoint | None = None
        outcome: _Outcome | None = None
        while outcome is None and not self._findings:
            disturbed = bool(pending)
            start = self._start(pending)
            newest = self._check_progress(start, newest)
            if not start.driver_was_killed and not self._findings:
                end = self._check_end(reference)
                if not disturbed:
                    outcome = end
                    for file in sorted(self._temporary.glob("drivetrain-*/*/*")):
                        self._findings.append(f"{file} is left over")
        for start in self._starts:
            self._findings += start.close()
        return outcome

    def close(self, crashes: Sequence[Crash]) -> CrashReport:
        """Delete all files, and return the report.

        Raises:
            CrashFound: there are findings. The files are kept.
        """
        report = CrashReport(
            crashes=tuple(crashes),
            killed=tuple(self._killed),
            findings=tuple(dict.fromkeys(self._findings)),
            starts=len(self._starts),
            directory=self._directory,
            storage_path=self._storage_path,
        )
        if report.findings:
            raise CrashFound(report)
        shutil.rmtree(self._directory)
        filesystem, root = locate(self._storage_path, what="CrashHarness(storage_path=...)")
        filesystem.delete(root)
        return report

    def _start(self, pending: deque[Crash]) -> JobStart:
        """Start the job once, wait for its end, and remove the crashes that have happened from ``pending``."""
        variables = {_STORAGE: self._storage_path, "TMPDIR": str(self._temporary)}
        output = self._directory / f"start_{len(self._starts) + 1}.txt"
        start = JobStart(self._job, variables, output, armed=any(crash.point for crash in pending))
        self._starts.append(start)
        pending_before = len(pending)
        self._findings += start.run(pending)
        self._killed += start.killed
        if len(self._starts) == 1 and not start.killed:
            self.undisturbed_s = start.seconds
        if pending_before and len(pending) == pending_before:
            missed = pending.popleft()
            self._killed.append(0)
            if missed.point is not None:
                self._findings.append(f"the run ended before {missed}")
        return start

    def _check_progress(self, start: JobStart, expected: CommittedCheckpoint | None) -> CommittedCheckpoint | None:
        """Check the checkpoint from which a start resumed, and all committed checkpoints; return the newest one."""
        which = f"start {len(self._starts)}"
        self._findings += [f"{which}: {line}" for line in start.output.splitlines() if _DAMAGE.search(line)]
        message = _CONTINUES.search(start.output)
        expected_name = expected.name if expected else None
        # A bucket may receive the last request of a killed driver after its manifest was read here.
        may_be_newer = not self._storage.is_local and message is not None and (message[1] or "") > (expected_name or "")
        if message is not None and message[1] != expected_name and not may_be_newer:
            self._findings.append(
                f"{which} continued from {message[1] or 'the beginning'}, but the last committed checkpoint was "
                f"{expected_name}"
            )
        if message is None and expected_name is not None and not start.driver_was_killed:
            self._findings.append(f"{which} did not print where it continued. Set RunConfig(verbose=1)")
        committed = read_manifest(self._storage, lambda line: self._findings.extend(_DAMAGE.findall(line) and [line]))
        for entry in committed:
            try:
                checkpoint_in(self._storage, entry.name).verify(checksums=True)
            except (CheckpointError, StorageError) as error:
                self._findings.append(f"after {which}: {error}")
        newest = committed[-1] if committed else None
        if expected is not None and (newest is None or newest.number < expected.number):
            self._findings.append(f"{expected.name} was committed, but is missing after {which}")
        return newest

    def _check_end(self, reference: _Outcome | None) -> _Outcome:
        """Check the results of a run whose driver was not killed, and return them."""
        outcome = self._read_outcome()
        where = f"after start {len(self._starts)}:"
        for name in sorted(outcome.names - (reference.names if reference else frozenset())):
            if reference is not None or name.startswith("."):
                self._findings.append(f"{where} {self._storage.path(name)} is left over")
        for name in self._storage.walk(PENDING):
            self._findings.append(f"{where} {self._storage.path(PENDING, name)} is left over")
        for entry in read_manifest(self._storage):
            listing = self._storage.read_bytes(f"{entry.name}/{LISTING_FILE}") or b""
            listed = {*parse_listing(listing, entry.name)[0], LISTING_FILE, METADATA_FILE, PIN_FILE}
            for name in sorted(self._storage.walk(entry.name).keys() - listed):
                self._findings.append(
                    f"{where} {self._storage.path(entry.name, name)} is not in the checkpoint's listing"
                )
        if reference is not None:
            self._findings += [f"{where} {difference}" for difference in _compare(outcome, reference)]
        return outcome

    def _read_outcome(self) -> _Outcome:
        storage = self._storage
        committed = read_manifest(storage)
        directories, files = storage.list_names()
        tables = {}
        for name in files:
            if name.startswith("result") and name.endswith(".json"):
                lines = (storage.read_bytes(name) or b"").splitlines(keepends=True)
                tables[name] = [self._compared(json.loads(line)) for line in lines]
            elif name == "progress.csv":
                text = (storage.read_bytes(name) or b"").decode()
                tables[name] = [self._compared(row) for row in csv.DictReader(io.StringIO(text, newline=""))]
        if not storage.is_local:  # a server may list empty directories of uploads that were interrupted
            directories = [name for name in directories if storage.walk(name)]
        digests = {}
        if committed and self._job.same_files:
            with tempfile.TemporaryDirectory(dir=self._directory) as copy:
                checkpoint_in(storage, committed[-1].name).to_directory(copy)
                for file in sorted(Path(copy).rglob("*")):
                    if file.is_file():
                        digests[str(file.relative_to(copy))] = hashlib.sha256(file.read_bytes()).hexdigest()
        return _Outcome(
            names=frozenset({*directories, *files} - {entry.name for entry in committed} - {PENDING}),
            iteration=committed[-1].iteration if committed else None,
            tables=tables,
            files=digests,
        )

    def _compared(self, row: Mapping[str, Any]) -> dict[str, Any]:
        compared = self._job.metrics
        return {
            name: value
            for name, value in row.items()
            if name == _ITERATION or (not name.startswith("_") if compared is None else name in compared)
        }


def _compare(outcome: _Outcome, reference: _Outcome) -> Iterator[str]:
    if outcome.iteration != reference.iteration:
        yield f"the last checkpoint: expected iteration {reference.iteration}, got {outcome.iteration}"
    for name, expected in reference.tables.items():
        rows = outcome.tables.get(name, ())
        if [row.get(_ITERATION) for row in rows] != [row.get(_ITERATION) for row in expected]:
            yield f"{name}: expected other iterations, got {[row.get(_ITERATION) for row in rows]}"
        elif rows != expected:
            yield next(
                f"{name}: expected {other}, got {row}"
                for row, other in zip(rows, expected, strict=True)
                if row != other
            )
    for name in sorted(outcome.files.keys() | reference.files.keys()):
        if outcome.files.get(name) != reference.files.get(name):
            yield f"{name} of the last checkpoint differs from that of an undisturbed run"


def _join(path: str, name: str) -> str:
    base, question_mark, query = path.partition("?") if "://" in path else (path, "", "")
    return f"{base.rstrip('/')}/{name}{question_mark}{query}"


def _own_command(storage_path: str) -> list[str]:
    filesystem, _ = locate(storage_path, what="CrashHarness(storage_path=...)")
    steps = _LOCAL_STEPS if filesystem.is_local else _REMOTE_STEPS
    return [sys.executable, "-m", "drivetrain_testing._crashjob", "--steps", str(steps)]


@dataclass
class _Tally:
    """Counts the crashes, and the crashes with findings, by kind (a point or a random instant) and victim."""

    crashes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    starts: int = 0

    def add(self, kind: str, call: Callable[[], CrashReport]) -> None:
        try:
            report = call()
        except CrashFound as found:
            report = found.report
            print(report, flush=True)
        self.starts += report.starts
        for crash, killed in zip(report.crashes, report.killed, strict=False):
            if killed or report.findings:
                self.crashes[kind, crash.victim] += 1
                self.failed[kind, crash.victim] += bool(report.findings)

    def table(self) -> str:
        rows: list[tuple[str, ...]] = [("", *VICTIMS)]
        for kind in dict.fromkeys(kind for kind, _ in self.crashes):
            rows.append((kind, *(self._cell(kind, victim) for victim in VICTIMS)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _cell(self, kind: str, victim: str) -> str:
        crashes, failed = self.crashes[kind, victim], self.failed[kind, victim]
        return f"{failed} of {crashes} FAILED" if failed else f"{crashes} ok" if crashes else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the docstring of this module describes.

    Args:
        arguments: the command's arguments; None for those of this process.

    Returns:
        The exit code: 0, or 1 if there are findings.
    """
    parser = argparse.ArgumentParser(
        prog="python -m drivetrain_testing._crash",
        description="Crash a job at every point of the storage protocol and at random instants, and check the results.",
    )
    parser.add_argument("--storage-path", help="the path or URI for the job's runs")
    parser.add_argument("--directory", help="for output and temporary files; default: a temporary directory")
    parser.add_argument("--points", nargs="*", choices=POINTS, default=POINTS, metavar="POINT", help="default: all")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, metavar="VICTIM", help="default: all")
    parser.add_argument(
        "--occurrences", nargs="+", type=int, default=[1, 5], help="crash when a point is reached for the n-th time"
    )
    parser.add_argument("--random", type=int, default=20, help="number of additional crashes at random instants")
    parser.add_argument("--in-a-row", type=int, default=3, help="maximum number of random crashes of one run")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random instants")
    parser.add_argument("--name", default="run", help="the name of the job's run")
    parser.add_argument("command", nargs="*", help="the command that starts your own job, after --")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    directory = options.directory or tempfile.mkdtemp(prefix="crashes-")
    harness = CrashHarness(
        directory, storage_path=options.storage_path, command=options.command or None, name=options.name
    )
    started = time.monotonic()
    print(f"seed {seed}, directory {directory}, undisturbed {harness.duration_s:.2f} s", flush=True)
    tally = _Tally()
    for point in options.points:
        for victim in options.victims:
            if point in _WITHOUT_WORKERS and victim in ("worker", "workers"):
                continue
            for occurrence in options.occurrences:
                tally.add(point, lambda: harness.crash_at(point, victim, occurrence=occurrence))  # noqa: B023
    rng = random.Random(seed)
    while sum(count for (kind, _), count in tally.crashes.items() if kind == "random instant") < options.random:
        crashes = [
            Crash(rng.choice(options.victims), after_s=rng.uniform(0.0, harness.duration_s))
            for _ in range(rng.randint(1, options.in_a_row))
        ]
        tally.add("random instant", lambda: harness.crash(*crashes))  # noqa: B023
    print(tally.table())
    failed = sum(tally.failed.values())
    total, seconds = sum(tally.crashes.values()), time.monotonic() - started
    print(f"{total} crashes, {tally.starts} starts, {failed} crashes with findings, {seconds:.0f} s")
    if not failed and options.directory is None:
        shutil.rmtree(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
