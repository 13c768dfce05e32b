"""Every fault at every moment of a run: its outcome, failure kind, message, detection time, and leftovers.

``DRIVETRAIN_FAULTS=all`` also runs the cells that by default are left to similar ones, see ``is_covered_by_another``.
"""

import errno
import itertools
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain import (
    FailureConfig,
    FailureKind,
    RemoteError,
    Result,
    TrainingFailedError,
    WaitTimeoutError,
    WorkerDiedError,
)
from drivetrain._driver.attempt import Attempt
from drivetrain._storage.node import sweep
from drivetrain.errors import StorageError
from drivetrain.plugin import Backend, Report
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import with_processes
from tests.faults.scenarios import (
    FAULTS,
    HOUR_S,
    STEPS,
    STRUCK_STEP,
    VICTIM,
    BreaksController,
    FailsInSetup,
    ImportTrap,
    Moment,
    Plan,
    TwoWordsError,
    break_controller,
    train,
)
from tests.faults.table import PROPERTY, Row
from tests.support import Collector, Pipe, is_running, release, wait_until_exited

FIRST, MIDST, UPLOAD, RESTART = Moment
DEATH_S = 10.0
HANG_S = 5.0
RAY_SAYS = "died; Ray reports|is unreachable"  # the latter if Ray learns the cause late
LATE_S = 1.0
MEMORY = Path("/dev/shm")
ALL = os.environ.get("DRIVETRAIN_FAULTS") == "all"
ONCE = "the function is loaded and the backend set up once, at the start of an attempt"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the matrix.

    Attributes:
        name: its name; a key of ``FAULTS``.
        kind: its failure kind; None if nothing fails.
        cause: the type of the root cause.
        says: the first line of the message without the rank, by runtime or for both.
        rank: whether the first line and the error name the victim.
        retried: whether it is retried if the budget allows.
        noticed_s: the maximum number of seconds until it is detected.
        left_out: the moments at which it cannot strike, with the reasons.
        options: further options of the run.
    """

    name: str
    kind: FailureKind | None = FailureKind.USER_ERROR
    cause: type[BaseException] = Exception
    says: str | Mapping[str, str] = ""
    rank: bool = True
    retried: bool = True
    noticed_s: float = DEATH_S
    left_out: Mapping[Moment, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def moments(self) -> list[Moment]:
        return [moment for moment in Moment if moment not in self.left_out]

    def words(self, runtime: str) -> str:
        return self.says if isinstance(self.says, str) else self.says[runtime]


MATRIX = [
    Fault(
        name="SIGKILL",
        kind=FailureKind.INFRASTRUCTURE,
        cause=WorkerDiedError,
        says={"local": "was killed by SIGKILL", "ray": RAY_SAYS},
    ),
    Fault(
        name="SIGSTOP",
        kind=FailureKind.HANG,
        cause=WaitTimeoutError,
        says=r"is stopped \(SIGSTOP\)",
        noticed_s=HANG_S + 30.0,
        options={"hang_timeout_s": HANG_S},
    ),
    Fault(
        name="SIGSEGV",
        kind=FailureKind.INFRASTRUCTURE,
        cause=WorkerDiedError,
        says={"local": "was killed by SIGSEGV", "ray": RAY_SAYS},
    ),
    Fault(name="sys.exit(0)", kind=None),
    Fault(
        name="os._exit(3)",
        kind=FailureKind.INFRASTRUCTURE,
        cause=WorkerDiedError,
        says={"local": "exited with code 3", "ray": RAY_SAYS},
    ),
    Fault(
        name="import error",
        cause=ImportError,
        says="failed while loading the train function: ImportError: no module named flash_attention",
        left_out={MIDST: ONCE, UPLOAD: ONCE},
    ),
    Fault(
        name="backend set-up",
        cause=OSError,
        says="failed while setting up the framework: OSError: address already in use",
        left_out={MIDST: ONCE, UPLOAD: ONCE},
    ),
    Fault(
        name="exception whose __init__ requires arguments",
        cause=TwoWordsError,
        says="failed while running the train function: TwoWordsError: bread and butter",
    ),
    Fault(name="unpicklable exception", cause=RemoteError, says="SocketError: holds a socket"),
    Fault(name="memory limit", kind=FailureKind.OUT_OF_MEMORY, cause=MemoryError, says="MemoryError"),
    Fault(
        name="disk full",
        kind=FailureKind.STORAGE,
        cause=(StorageError, OSError),
        says="No space left on device",
    ),
    Fault(
        name="callback",
        cause=ZeroDivisionError,
        says="callback Raises.on_[a-z_]+\\(\\) raised ZeroDivisionError: division by zero",
        rank=False,
        retried=False,
    ),
    Fault(
        name="disk full for the driver",
        kind=FailureKind.STORAGE,
        cause=OSError,
        says="callback Raises.on_[a-z_]+\\(\\) raised OSError: .*No space left on device",
        rank=False,
    ),
    Fault(name="controller", cause=RuntimeError, says="RuntimeError: the controller broke", rank=False, retried=False),
    Fault(name="slow rank", kind=None, options={"hang_timeout_s": 5.0}),
    Fault(name="clock skew", kind=None),
]
"""Driver and nodes run in separate processes, and have separate tests below."""

ELSEWHERE = {"driver killed", "node killed", "node added"}
"""Faults that other tests of this folder cover."""


PROCESS_FAULTS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "os._exit(3)", "sys.exit(0)")
"""Faults that end or stop a process. The others are exceptions, delays, and faults of the driver itself: they are
handled in the same way on every runtime."""


def is_covered_by_another(fault: Fault, moment: Moment, runtime: str, outcome: str) -> bool:
    """Return True if by default a similar cell covers this one.

    A remaining retry makes no difference between moments. On Ray, only faults of the process are tested: SIGKILL at all
    moments, the others at one. A slow rank is slow at any moment.
    """
    if runtime == "ray" and fault.name not in PROCESS_FAULTS:
        return True
    ray_repeats_local = runtime == "ray" and fault.name != "SIGKILL"
    if outcome == "fails" and fault.retried:
        return moment is not MIDST or ray_repeats_local
    if fault.name == "slow rank":
        return moment is not MIDST
    return ray_repeats_local and moment is not MIDST


def cells() -> list[Any]:
    """Return one parameter per run: a cell may have two, one with a retry left and one without."""
    found = []
    for fault, runtime in itertools.product(MATRIX, ("local", "ray")):
        outcomes = ["recovers"] if fault.retried else []
        outcomes += ["fails"] if fault.kind is not None else []
        for moment, outcome in itertools.product(fault.moments, outcomes):
            if ALL or not is_covered_by_another(fault, moment, runtime, outcome):
                name = f"{fault.name}-{moment.value}-{runtime}-{outcome}"
                marks = [pytest.mark.ray] if runtime == "ray" else []
                found.append(pytest.param(runtime, fault, moment, outcome, id=name, marks=marks))
    return found


class Watch(Collector):
    """Records the processes of the run, and the time at which an attempt ended."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.run_id = ""
        self.pids: set[int] = set()
        self.stopped: list[float] = []

    def on_run_start(self, run: Any) -> None:
        self.run_id = run.id

    def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
        super().on_group_start(run, attempt, workers)
        self.pids |= {worker.pid for worker in workers}
        Path(self.plan.directory, "attempt").write_text(str(attempt))

    def on_group_stop(self, run: Any, attempt: int) -> None:
        self.stopped.append(time.monotonic())

    def is_time_to_strike(self) -> bool:
        """Return True if the controller has just reached the moment for the first time; for controller faults."""
        reached = {
            MIDST: len(self.checkpoints) == STRUCK_STEP,
            UPLOAD: len(self.checkpoints) == STRUCK_STEP < len(self.metrics_of(VICTIM)),
        }
        return self.attempts == 1 and reached.get(self.plan.moment, False)

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        super().on_checkpoint(run, checkpoint)
        release(self.plan.commits)

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        super().on_failure(run, failure, retrying)
        if retrying and self.plan.fault == "disk full":
            Path(run.path.parent, "filler").unlink(missing_ok=True)


class Raises(Watch):
    """Raises in the hook that belongs to the moment."""

    def __init__(self, plan: Plan, pipe: Pipe) -> None:
        super().__init__(plan)
        self.pipe = pipe

    def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
        super().on_group_start(run, attempt, workers)
        if self.plan.moment is FIRST and attempt == 0:
            self.fail()

    def on_resume(self, run: Any, iteration: int) -> None:
        if self.plan.moment is RESTART and self.attempts == 2:
            self.fail()

    def on_report(self, run: Any, report: Report) -> None:
        super().on_report(run, report)
        self.consider()

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        super().on_checkpoint(run, checkpoint)
        self.consider()

    def consider(self) -> None:
        if self.is_time_to_strike():
            self.pipe.receive()
            self.fail()

    def fail(self) -> None:
        self.plan.note()
        if self.plan.fault == "disk full for the driver":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise ZeroDivisionError("division by zero")


@pytest.fixture
def storage_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The directory of the run: on a different device than TMPDIR if uploads must copy, and small if it must fill."""
    fault: Fault = request.getfixturevalue("fault")
    moment: Moment = request.getfixturevalue("moment")
    if fault.name == "disk full":
        place = tmp_path / "small"
        place.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip(f"a small filesystem cannot be mounted here: {mounted.stderr.decode()}")
        yield place
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    elif moment is UPLOAD:
        if not MEMORY.is_dir():
            pytest.skip("an upload that is held requires a second filesystem")
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
            yield Path(directory)
    else:
        yield tmp_path


@pytest.fixture
def plan(tmp_path: Path, pipe: Pipe, fault: Fault, moment: Moment) -> Iterator[Plan]:
    made = Plan(fault=fault.name, moment=moment, directory=str(tmp_path), pipe=pipe.path)
    gates = [Pipe(Path(made.gate(attempt, rank))) for attempt in range(3) for rank in range(2)]
    gates.append(Pipe(Path(made.commits)))
    yield made
    for gate in gates:
        gate.close()


def options_of(fault: Fault, plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {"plan": plan}
    backend: Backend | None = None
    if fault.name == "import error":
        config["trap"] = ImportTrap(plan)
    elif fault.name == "backend set-up":
        backend = FailsInSetup(plan)
    elif fault.name == "controller" and plan.moment in (FIRST, RESTART):
        backend = BreaksController(plan)
    return {"config": config, "backend_config": backend, **fault.options}


def break_attempt(patch: pytest.MonkeyPatch, watch: Watch, pipe: Pipe) -> None:
    """Make the controller raise while it handles an event."""
    handle = Attempt.handle

    def handle_and_break(attempt: Attempt, event: Any) -> bool:
        is_over = handle(attempt, event)
        if watch.is_time_to_strike():
            pipe.receive()
            break_controller(watch.plan)
        return is_over

    patch.setattr(Attempt, "handle", handle_and_break)


@pytest.mark.parametrize(
    ("runtime", "fault", "moment", "outcome"),
    cells(),
    indirect=["runtime"],
)
def test_fault(
    runtime: RuntimeUnderTest,
    fault: Fault,
    moment: Moment,
    outcome: str,
    storage_path: Path,
    plan: Plan,
    pipe: Pipe,
    temporary_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    runtime.storage_path = storage_path
    before = processes(runtime.name)
    watch = Raises(plan, pipe) if fault.name in ("callback", "disk full for the driver") else Watch(plan)
    if fault.name == "controller" and moment in (MIDST, UPLOAD):
        break_attempt(monkeypatch, watch, pipe)
    failures_before = int(moment is RESTART)  # the failure that causes the restart
    budget = failures_before + (outcome == "recovers" or not fault.retried)
    result = runtime.trainer(
        train,
        callbacks=[watch],
        failure_config=FailureConfig(max_failures=budget),
        **options_of(fault, plan),
    ).fit(raise_on_failure=False)
    failures = watch.failures[failures_before:]
    noticed_s = watch.stopped[moment.attempt] - plan.struck_at() if fault.kind else None

    failure = failures[0] if failures else None
    row = Row(
        *(fault.name, moment.value, runtime.name, outcome if fault.retried else "fails, not retried"),
        *(failure.kind.value if failure else "", noticed_s, failure.summary if failure else ""),
    )
    record_property(PROPERTY, [*row])
    if outcome == "recovers":
        check_success(result, moment, without_failure=fault.kind is None)
        assert len(failures) == (fault.kind is not None)
    else:
        assert len(failures) == 1, "the run was retried"
        assert isinstance(result.error, TrainingFailedError)
        assert result.error.kind is fault.kind
        assert result.error.rank == (VICTIM if fault.rank and fault.kind is not FailureKind.HANG else None)
        assert str(result.error).splitlines()[0] == f"{failures[0].summary} [{fault.kind.value}]"
        assert [entry["step"] for _, entry in result.best_checkpoints] == list(range(moment.committed))
    if fault.kind is not None:
        assert failures[0].kind is fault.kind
        assert isinstance(failures[0].exception, fault.cause)
        assert re.search(fault.words(runtime.name), failures[0].summary)
        assert not fault.rank or f"rank {VICTIM}" in failures[0].summary
        assert "\n" not in failures[0].summary
        assert noticed_s is not None
        assert 0 <= noticed_s < fault.noticed_s
    if runtime.name == "ray" and fault.name == "SIGSTOP":
        wait_until_exited(watch.pids, deadline_s=10.0)  # Ray takes seconds to terminate a stopped process
        sweep("uploads")  # so its uploads are left for the next run on its node
    check_nothing_is_left(runtime.name, watch, Path(result.path), temporary_files, before)


@pytest.mark.parametrize(
    ("fault", "moment"), [(fault, RESTART) for fault in MATRIX if fault.name == "sys.exit(0)"], ids=["sys.exit(0)"]
)
@with_processes
def test_restart_continues_from_the_last_step_of_both_ranks_if_one_of_them_starts_late(
    runtime: RuntimeUnderTest, fault: Fault, moment: Moment, plan: Plan
) -> None:
    config = {"plan": replace(plan, late_s=LATE_S)}
    check_success(runtime.fit(train, config, failure_config=FailureConfig(max_failures=1)), moment)


def check_success(result: Result, moment: Moment, *, without_failure: bool = False) -> None:
    """Check that the run made all its steps, from the committed checkpoint if it restarted."""
    assert result.error is None
    resumed_at = moment.committed if moment is RESTART or not without_failure else 0
    assert result.return_value == resumed_at
    assert [entry["step"] for _, entry in result.best_checkpoints] == list(range(STEPS))
    times = [entry["_timestamp"] for _, entry in result.best_checkpoints]
    assert max(times) - min(times) < HOUR_S / 2, "metrics are of rank 0, whose clock is right"
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()


def processes(runtime: str) -> set[int]:
    """Return the descendants of this process, except Ray's own, which come and go."""
    if runtime == "ray":
        return set()
    return {process.pid for process in psutil.Process().children(recursive=True)}


def check_nothing_is_left(
    runtime: str, watch: Watch, run: Path, temporary_files: Path, before: set[int] | None = None
) -> None:
    """Check that no process, reservation, temporary file or lock is left."""
    wait_until_exited(watch.pids, deadline_s=10.0)
    if runtime == "ray":
        from ray.util import placement_group_table

        assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
    else:
        started = [psutil.Process(pid) for pid in processes(runtime) - (before or set()) if is_running(pid)]
        others = [process.cmdline() for process in started if "forkserver" not in " ".join(process.cmdline())]
        assert not others
    assert not sorted(temporary_files.glob("drivetrain-*/*/*"))
    assert not (run / ".lock").exists()
    assert f"@drivetrain-{os.getuid()}-{watch.run_id}" not in Path("/proc/net/unix").read_text()


def test_every_fault_has_a_cell_or_a_reason_at_every_moment() -> None:
    assert {fault.name for fault in MATRIX} | ELSEWHERE == set(FAULTS)
    for fault in MATRIX:
        assert all(fault.left_out.values()), fault.name
        assert len(fault.left_out) < len(Moment), fault.name
