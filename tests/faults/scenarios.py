"""The train function of a run with a fault, and the faults. Workers import it, so it must not import pytest."""

import contextlib
import ctypes
import enum
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import drivetrain
from drivetrain import Checkpoint
from drivetrain._base.crashpoints import ADDRESS
from drivetrain._hooks.backend import NoBackend
from drivetrain._hooks.context import TrainContext
from drivetrain.plugin import Backend
from tests.support import release, send_line, wait_for_release

STEPS = 4
STRUCK_STEP = 2
VICTIM = 1
SLOW_S = 2.0
HOUR_S = 3600.0
WEIGHTS = b"w" * (1 << 16)


class Moment(enum.Enum):
    """The moment at which a fault strikes."""

    FIRST = "before the first report"
    MIDST = "between reports"
    UPLOAD = "during an upload"
    RESTART = "during a restart"

    @property
    def attempt(self) -> int:
        return 1 if self is Moment.RESTART else 0

    @property
    def committed(self) -> int:
        """The number of checkpoints committed at this moment."""
        return 0 if self is Moment.FIRST else STRUCK_STEP


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fault to inject, and the paths of its files.

    Attributes:
        fault: the name of a function below; empty for nothing.
        moment: the moment at which it strikes.
        directory: has a named pipe for each attempt and direction, and the file with the time of the fault.
        pipe: a named pipe to request a fault from outside, and to wait for it.
        late_s: delay in seconds with which the other rank enters the train function after the victim.
    """

    fault: str
    moment: Moment
    directory: str
    pipe: str = ""
    late_s: float = 0.0

    def gate(self, attempt: int, rank: int) -> str:
        """The pipe at which that rank waits for the other one."""
        return f"{self.directory}/gate_{attempt}_{rank}"

    @property
    def commits(self) -> str:
        """The pipe on which the driver announces that it has committed a checkpoint."""
        return f"{self.directory}/commits"

    def note(self) -> None:
        """Record that the fault strikes now; all processes of a machine share this clock."""
        Path(self.directory, "struck").write_text(repr(time.monotonic()))

    def struck_at(self) -> float:
        return float(Path(self.directory, "struck").read_text())

    def is_current(self, attempt: int, rank: int) -> bool:
        """Return True for the attempt and rank that the fault strikes."""
        return (attempt, rank) == (self.moment.attempt, VICTIM)


def train(config: Mapping[str, Any]) -> int:
    """Count steps in checkpoints; return the step that this attempt has resumed from.

    The ranks report in turn, the victim first, and wait for each other as in a collective. Therefore both have made all
    reports before the struck step when the fault strikes.
    """
    plan: Plan = config["plan"]
    context = drivetrain.get_context()
    rank, attempt = context.get_world_rank(), context.attempt
    checkpoint = drivetrain.get_checkpoint()
    first = int(Path(checkpoint.path, "step").read_text()) + 1 if checkpoint else 0
    if rank != VICTIM:
        time.sleep(plan.late_s)
    for step in range(first, STEPS):
        if rank != VICTIM:
            wait_for_release(plan.gate(attempt, rank))
        if rank == VICTIM and attempt == 0 and plan.moment is Moment.RESTART and step == STRUCK_STEP:
            raise RuntimeError("the failure that causes the restart")
        struck = plan.fault and plan.is_current(attempt, rank) and step == plan.moment.committed
        if struck and plan.moment is Moment.UPLOAD:
            with upload_in_flight(step) as let_go:
                FAULTS[plan.fault](plan, let_go)
        else:
            if struck:
                FAULTS[plan.fault](plan, lambda: None)
            report_step(step)
        release(plan.gate(attempt, 1 - rank))
        if rank == VICTIM:
            wait_for_release(plan.gate(attempt, rank))
    return first


def report_step(step: int, **options: Any) -> None:
    rank = drivetrain.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"weights_{rank}").write_bytes(WEIGHTS)
        if rank == 0:
            Path(directory, "step").write_text(str(step))
        drivetrain.report({"step": step}, Checkpoint(directory), **options)


@contextlib.contextmanager
def upload_in_flight(step: int) -> Iterator[Callable[[], None]]:
    """Report a step, and hold its background upload at its first file until it is released.

    The run directory has to be on another device than the temporary directory.
    """
    address = f"{tempfile.mkdtemp()}/held"
    held: list[socket.socket] = []

    def hold_after_the_copy() -> None:
        copied = False
        while not held:
            line, _ = harness.accept()
            point = line.recv(1000)
            if copied:
                held.append(line)
                return
            copied = b"after upload" in point
            line.sendall(b".")
            line.close()

    def let_go() -> None:
        os.environ.pop(ADDRESS, None)
        held[0].close()  # the upload treats this as a response

    with socket.socket(socket.AF_UNIX) as harness:
        harness.bind(address)
        harness.listen()
        holder = threading.Thread(target=hold_after_the_copy)
        holder.start()
        os.environ[ADDRESS] = address
        report_step(step, checkpoint_upload_mode="async")
        holder.join(30)
    yield let_go
    let_go()


class TwoWordsError(Exception):
    """An exception whose default pickle does not match its constructor."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class SocketError(Exception):
    """An exception that cannot be pickled at all."""

    def __init__(self) -> None:
        super().__init__("holds a socket")
        self.socket = socket.socket()


LetGo = Callable[[], None]


def kill(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    os.kill(os.getpid(), signal.SIGSTOP)


def crash(plan: Plan, let_go: LetGo) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    plan.note()
    ctypes.string_at(0)


def return_successfully(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    let_go()
    for _ in range(plan.moment.committed, STEPS):  # the other rank makes its remaining steps alone
        release(plan.gate(plan.moment.attempt, 1 - VICTIM))
    sys.exit(0)


def exit_at_once(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    os._exit(3)


def raise_two_words(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    raise TwoWordsError("bread", "butter")


def raise_unpicklable(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    raise SocketError


def use_up_memory(plan: Plan, let_go: LetGo) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    plan.note()
    bytearray(1 << 30)


def fill_disk(plan: Plan, let_go: LetGo) -> None:
    wait_for_commits(plan)
    run = Path(drivetrain.get_context().get_run_dir())
    free = os.statvfs(run)
    with (run.parent / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    plan.note()
    let_go()
    if plan.moment is Moment.UPLOAD:
        sys.exit(0)  # the exit waits for the upload


def be_slow(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    time.sleep(SLOW_S)  # the pace itself is tested
    let_go()


def set_clock_back(plan: Plan, let_go: LetGo) -> None:
    plan.note()
    true_time = time.time
    time.time = lambda: true_time() - HOUR_S
    let_go()


def wait_for_commits(plan: Plan) -> None:
    """Wait until the driver has committed every checkpoint expected at this moment."""
    for _ in range(plan.moment.committed):
        wait_for_release(plan.commits)


def wait_for_the_end_of_the_driver(plan: Plan, let_go: LetGo) -> None:
    wait_for_commits(plan)
    wait_for_fault(plan, let_go)


def wait_for_fault(plan: Plan, let_go: LetGo) -> None:
    """Wait for a fault from outside."""
    send_line(plan.pipe, "here")
    threading.Event().wait(60)


def wait_for_event(plan: Plan, let_go: LetGo) -> None:
    """Wait for an event from outside, after which the training continues."""
    send_line(plan.pipe, "here")
    wait_for_release(plan.gate(9, VICTIM))
    let_go()


def nothing(plan: Plan, let_go: LetGo) -> None:
    """Do nothing: the fault strikes before the train function."""


FAULTS: dict[str, Callable[[Plan, LetGo], None]] = {
    "SIGKILL": kill,
    "SIGSTOP": stop,
    "SIGSEGV": crash,
    "sys.exit(0)": return_successfully,
    "os._exit(3)": exit_at_once,
    "exception whose __init__ requires arguments": raise_two_words,
    "unpicklable exception": raise_unpicklable,
    "memory limit": use_up_memory,
    "disk full": fill_disk,
    "slow rank": be_slow,
    "clock skew": set_clock_back,
    "import error": nothing,
    "backend set-up": nothing,
    "callback": wait_for_fault,
    "disk full for the driver": wait_for_fault,
    "controller": wait_for_fault,
    "driver killed": wait_for_the_end_of_the_driver,
    "node killed": wait_for_fault,
    "node added": wait_for_event,
}


class ImportTrap:
    """Part of a train function's config; the victim cannot load it in the struck attempt."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_or_fail, (self.plan,)


def _load_or_fail(plan: Plan) -> ImportTrap:
    attempt = Path(plan.directory, "attempt")  # written by the driver
    if plan.is_current(int(attempt.read_text()), int(os.environ["RANK"])):
        plan.note()
        raise ImportError("no module named flash_attention")
    return ImportTrap(plan)


class FailsInSetup(Backend):
    """Fails on the victim, like a framework whose port is in use."""

    name = "the framework"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        if self.plan.is_current(context.attempt, context.get_world_rank()):
            self.plan.note()
            raise OSError("address already in use")
        yield


class BreaksController(NoBackend):
    """Raises on the controller's thread at the start of the attempt."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.attempts = 0

    def rendezvous(self, group: Any) -> Any:
        self.attempts += 1
        if self.attempts == self.plan.moment.attempt + 1:
            break_controller(self.plan)
        return super().rendezvous(group)


def break_controller(plan: Plan) -> NoReturn:
    plan.note()
    raise RuntimeError("the controller broke")
