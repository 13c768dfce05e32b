"""The crash harness: ends a job's processes where it hurts, and checks that the run comes out as if nothing had been.

A crash is a ``kill -9`` of the driver, of one worker, of all workers or of everything, when the storage protocol comes
to a named point (:data:`POINTS`) or after some seconds. After each crash every committed checkpoint has to verify, the
next start has to continue from the newest, and at the end the metrics files and the last checkpoint have to be those of
an undisturbed run, with no orphan left: no uncommitted checkpoint, no draft of a file, no local copy, no process.

In a test::

    from drivetrain.testing import CrashHarness

    def test_my_job_survives(tmp_path):
        harness = CrashHarness(tmp_path, command=[sys.executable, "train.py"])
        harness.crash_at("during manifest write", victim="driver")
        harness.crash_after(2.5, victim="both")

On the command line, here with the job that comes with it, on a storage of one's own::

    python -m drivetrain.testing.crash --random 200 --storage-path s3://bucket/crashes

Without ``command`` the harness runs :mod:`drivetrain.testing.crashjob`, which is also the pattern for other jobs.
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

from drivetrain._base.crashpoints import POINTS
from drivetrain._storage.checkpoint import checkpoint_in, parse_listing
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import LISTING_FILE, METADATA_FILE, PENDING, PIN_FILE
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.remote import locate
from drivetrain.errors import CheckpointError, StorageError
from drivetrain.testing.crashstart import VICTIMS, Crash, JobSpec, JobStart

__all__ = ["POINTS", "VICTIMS", "Crash", "CrashFound", "CrashHarness", "CrashReport", "main"]

_STORAGE = "DRIVETRAIN_STORAGE_PATH"
_WITHOUT_WORKERS = ("during sweep",)
_LOCAL_STEPS = 60
_REMOTE_STEPS = 8
_ITERATION = "_training_iteration"
_CONTINUES = re.compile(r"resume=.*, found .*, (?:continues from ([^\s(]+)|starts from the beginning)")
_DAMAGE = re.compile(r"is damaged|left as it is|could not be deleted")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashReport:
    """What came of some crashes of one run.

    Attributes:
        crashes: what was asked for.
        killed: how many processes each of them has ended; 0 where the run was over before its moment.
        findings: what was not as it has to be, in words.
        starts: how often the job was started.
        directory: the output of each start; kept if something was found.
        storage_path: where the job kept its run; kept if something was found.
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
    """A run did not come out as if nothing had been.

    Attributes:
        report: what was found.
    """

    def __init__(self, report: CrashReport) -> None:
        super().__init__(str(report))
        self.report = report


class CrashHarness:
    """Crashes runs of a job, each in a directory of its own, and compares them with an undisturbed one.

    The job has to be deterministic, and to run on the local runtime. It keeps its run under a fixed name where
    ``DRIVETRAIN_STORAGE_PATH`` says, which is where it goes without a ``storage_path``, with ``resume="auto"``, a
    ``verbose`` of at least 1, and enough ``max_failures`` for the workers that are ended.

    Args:
        directory: for the job's output, its temporary files, and its runs where no ``storage_path`` is given.
        storage_path: where its runs are kept: a path or URI. Credentials come from this process's environment.
        command: what starts the job, as the process that becomes the driver; None for the module
            ``drivetrain.testing.crashjob``.
        name: the ``RunConfig(name=...)`` of the job.
        environment: variables of the job on top of this process's.
        metrics: the names of the metrics that have to be the same after a crash; None for all that do not begin with
            an underscore.
        same_files: the files of the last checkpoint have to be the same after a crash.
        deadline_s: seconds that the job may take from one start to its end.

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
        """Seconds that the job took when it was last left alone from its start to its end; it is run once for that."""
        self._reference()
        return self._seconds

    def crash_at(self, point: str, victim: str = "driver", *, occurrence: int = 1) -> CrashReport:
        """Ends processes at a point of the protocol.

        So that there is something to be swept, ``"during sweep"`` ends the driver after an upload first.

        Args:
            point: one of :data:`POINTS`.
            victim: one of :data:`VICTIMS`.
            occurrence: the how-manieth time that any process comes to the point, from 1.

        Raises:
            CrashFound: something was not as it has to be.
        """
        crash = Crash(victim, point=point, occurrence=occurrence)
        if point == "during sweep":
            return self.crash(Crash("driver", point="after upload", occurrence=occurrence), Crash(victim, point=point))
        return self.crash(crash)

    def crash_after(self, seconds: float, victim: str = "driver") -> CrashReport:
        """Ends processes so many seconds after the start.

        Raises:
            CrashFound: something was not as it has to be.
        """
        return self.crash(Crash(victim, after_s=seconds))

    def crash(self, *crashes: Crash) -> CrashReport:
        """Starts the job, crashes it, starts it again until it has ended undisturbed, and checks everything.

        Args:
            crashes: what is to happen, in this order. After a crash that leaves the driver alive the next one hits the
                same start of the job, otherwise the next start.

        Returns:
            A report without findings.

        Raises:
            CrashFound: something was not as it has to be. The run is left as it is.
        """
        reference = self._reference()
        self._cases += 1
        case = _Case(self._job, self._directory, f"case_{self._cases:04d}_{self._token}")
        case.run(crashes, reference)
        self._seconds = case.undisturbed_s or self._seconds
        return case.close(crashes)

    def _reference(self) -> _Outcome:
        if self._undisturbed is None:
            case = _Case(self._job, self._directory, f"undisturbed_{self._token}")
            outcome = case.run((), None)
            case.close(())
            assert outcome is not None
            self._undisturbed, self._seconds = outcome, case.undisturbed_s
        return self._undisturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a run has left.

    Attributes:
        names: what is in the run directory beside committed checkpoints.
        iteration: that of the last checkpoint; None without any.
        tables: the rows of the metrics files, as far as they have to be the same.
        files: the digest of each file of the last checkpoint.
    """

    names: frozenset[str]
    iteration: int | None
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    files: Mapping[str, str]


class _Case:
    """One run, from its first start to its undisturbed end."""

    def __init__(self, job: JobSpec, directory: Path, name: str) -> None:
        self.undisturbed_s = 0.0
        """Seconds of the first start, if nothing has happened to it."""
        self._job = job
        self._directory = directory / name
        self._temporary = self._directory / "tmp"
        self._temporary.mkdir(parents=True)
        self._storage_path = _join(job.storage_path, name)
        self._storage = Storage(*locate(_join(self._storage_path, job.name), what="CrashHarness(storage_path=...)"))
        self._starts: list[JobStart] = []
        self._killed: list[int] = []
        self._findings: list[str] = []

    def run(self, crashes: Sequence[Crash], reference: _Outcome | None) -> _Outcome | None:
        """Starts the job until all crashes have happened and it has ended undisturbed, or something was found."""
        waiting = deque(crashes)
        newest: CommittedCheckpoint | None = None
        outcome: _Outcome | None = None
        while outcome is None and not self._findings:
            disturbed = bool(waiting)
            start = self._start(waiting)
            newest = self._check_progress(start, newest)
            if not start.driver_was_killed and not self._findings:
                end = self._check_end(reference)
                if not disturbed:
                    outcome = end
                    for file in sorted(self._temporary.glob("drivetrain-*/*/*")):
                        self._findings.append(f"{file} is left behind")
        for start in self._starts:
            self._findings += start.close()
        return outcome

    def close(self, crashes: Sequence[Crash]) -> CrashReport:
        """Tells what was found, or takes everything away if nothing was.

        Raises:
            CrashFound: something was.
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

    def _start(self, waiting: deque[Crash]) -> JobStart:
        """Starts the job, and takes the crashes that happen from those that wait."""
        variables = {_STORAGE: self._storage_path, "TMPDIR": str(self._temporary)}
        output = self._directory / f"start_{len(self._starts) + 1}.txt"
        start = JobStart(self._job, variables, output, armed=any(crash.point for crash in waiting))
        self._starts.append(start)
        before = len(waiting)
        self._findings += start.play(waiting)
        self._killed += start.killed
        if len(self._starts) == 1 and not start.killed:
            self.undisturbed_s = start.seconds
        if before and len(waiting) == before:
            missed = waiting.popleft()
            self._killed.append(0)
            if missed.point is not None:
                self._findings.append(f"the run was over before {missed}")
        return start

    def _check_progress(self, start: JobStart, expected: CommittedCheckpoint | None) -> CommittedCheckpoint | None:
        """Whether it continued from where it should, and what is committed now is whole; returns the newest."""
        which = f"start {len(self._starts)}"
        self._findings += [f"{which}: {line}" for line in start.output.splitlines() if _DAMAGE.search(line)]
        said = _CONTINUES.search(start.output)
        wanted = expected.name if expected else None
        if said is not None and said[1] != wanted:
            self._findings.append(
                f"{which} continued from {said[1] or 'the beginning'}, and {wanted or 'nothing'} was committed last"
            )
        if said is None and wanted is not None and not start.driver_was_killed:
            self._findings.append(f"{which} did not say where it continued from: RunConfig(verbose=1) says so")
        committed = read_manifest(self._storage, lambda line: self._findings.extend(_DAMAGE.findall(line) and [line]))
        for entry in committed:
            try:
                checkpoint_in(self._storage, entry.name).verify(checksums=True)
            except (CheckpointError, StorageError) as error:
                self._findings.append(f"after {which}: {error}")
        newest = committed[-1] if committed else None
        if expected is not None and (newest is None or newest.index < expected.index):
            self._findings.append(f"{expected.name} was committed, and is gone after {which}")
        return newest

    def _check_end(self, reference: _Outcome | None) -> _Outcome:
        """Whether a run that has ended by itself is as if nothing had been."""
        outcome = self._read_outcome()
        where = f"after start {len(self._starts)}:"
        for name in sorted(outcome.names - (reference.names if reference else frozenset())):
            if reference is not None or name.startswith("."):
                self._findings.append(f"{where} {self._storage.path(name)} is left behind")
        for name in self._storage.walk(PENDING):
            self._findings.append(f"{where} {self._storage.path(PENDING, name)} is left behind")
        for entry in read_manifest(self._storage):
            listing = self._storage.read_bytes(f"{entry.name}/{LISTING_FILE}") or b""
            known = {*parse_listing(listing, entry.name)[0], LISTING_FILE, METADATA_FILE, PIN_FILE}
            for name in sorted(self._storage.walk(entry.name).keys() - known):
                self._findings.append(f"{where} {self._storage.path(entry.name, name)} belongs to nobody")
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
        if not storage.is_local:  # a server may show what an upload has begun that did not come to its end
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
        chosen = self._job.metrics
        return {
            name: value
            for name, value in row.items()
            if name == _ITERATION or (not name.startswith("_") if chosen is None else name in chosen)
        }


def _compare(outcome: _Outcome, reference: _Outcome) -> Iterator[str]:
    if outcome.iteration != reference.iteration:
        yield f"the last checkpoint is of iteration {outcome.iteration} instead of {reference.iteration}"
    for name, wanted in reference.tables.items():
        rows = outcome.tables.get(name, ())
        if [row.get(_ITERATION) for row in rows] != [row.get(_ITERATION) for row in wanted]:
            yield f"{name} has the iterations {[row.get(_ITERATION) for row in rows]}"
        elif rows != wanted:
            yield next(
                f"{name} has {row} instead of {other}" for row, other in zip(rows, wanted, strict=True) if row != other
            )
    for name in sorted(outcome.files.keys() | reference.files.keys()):
        if outcome.files.get(name) != reference.files.get(name):
            yield f"{name} of the last checkpoint is not that of an undisturbed run"


def _join(path: str, name: str) -> str:
    base, question_mark, query = path.partition("?") if "://" in path else (path, "", "")
    return f"{base.rstrip('/')}/{name}{question_mark}{query}"


def _own_command(storage_path: str) -> list[str]:
    filesystem, _ = locate(storage_path, what="CrashHarness(storage_path=...)")
    steps = _LOCAL_STEPS if filesystem.is_local else _REMOTE_STEPS
    return [sys.executable, "-m", "drivetrain.testing.crashjob", "--steps", str(steps)]


@dataclass
class _Tally:
    """How many crashes there were, and how many of them with findings, by their kind and victim."""

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
    """Runs the command; see the module's docstring.

    Args:
        arguments: what comes after the command's name; None for this process's.

    Returns:
        The exit status: 0, or 1 if something was found.
    """
    parser = argparse.ArgumentParser(
        prog="python -m drivetrain.testing.crash",
        description="Crash a job at every point of the storage protocol and at random instants, and check the results.",
    )
    parser.add_argument("--storage-path", help="where the job's runs are kept: a path or URI")
    parser.add_argument("--directory", help="for output and temporary files; a temporary one otherwise")
    parser.add_argument("--points", nargs="*", choices=POINTS, default=POINTS, metavar="POINT", help="default: all")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, metavar="VICTIM", help="default: all")
    parser.add_argument("--occurrences", nargs="+", type=int, default=[1, 5], help="at which times that it is reached")
    parser.add_argument("--random", type=int, default=20, help="at how many random instants besides")
    parser.add_argument("--in-a-row", type=int, default=3, help="at most so many of those on one run")
    parser.add_argument("--seed", type=int, default=None, help="of those")
    parser.add_argument("--name", default="run", help="the name of the job's run")
    parser.add_argument("command", nargs="*", help="what starts a job of your own, after --")
    chosen = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 31) if chosen.seed is None else chosen.seed
    directory = chosen.directory or tempfile.mkdtemp(prefix="crashes-")
    harness = CrashHarness(
        directory, storage_path=chosen.storage_path, command=chosen.command or None, name=chosen.name
    )
    began = time.monotonic()
    print(f"seed {seed}, directory {directory}, undisturbed {harness.duration_s:.2f} s", flush=True)
    tally = _Tally()
    for point in chosen.points:
        for victim in chosen.victims:
            if point in _WITHOUT_WORKERS and victim in ("worker", "workers"):
                continue
            for occurrence in chosen.occurrences:
                tally.add(point, lambda: harness.crash_at(point, victim, occurrence=occurrence))  # noqa: B023
    rng = random.Random(seed)
    while sum(count for (kind, _), count in tally.crashes.items() if kind == "random instant") < chosen.random:
        crashes = [
            Crash(rng.choice(chosen.victims), after_s=rng.uniform(0.0, harness.duration_s))
            for _ in range(rng.randint(1, chosen.in_a_row))
        ]
        tally.add("random instant", lambda: harness.crash(*crashes))  # noqa: B023
    print(tally.table())
    failed = sum(tally.failed.values())
    total, seconds = sum(tally.crashes.values()), time.monotonic() - began
    print(f"{total} crashes, {tally.starts} starts, {failed} crashes with findings, {seconds:.0f} s")
    if not failed and chosen.directory is None:
        shutil.rmtree(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
