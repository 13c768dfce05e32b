"""The train functions, the callbacks and the backends of the conformance kit for runtimes.

Workers and driver processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from drivetrain import Callback, Checkpoint, ScalingConfig, TrainContext, get_checkpoint, get_context, report
from drivetrain.plugin import Backend, Report, Run, Runtime, WorkerInfo
from drivetrain.plugin.backends import WorkerGroup
from drivetrain.plugin.callbacks import CommittedCheckpoint
from drivetrain.plugin.runtimes import Group, GroupSpec
from drivetrain_testing._jobs import END_S, return_facts

__all__ = [
    "GROWS_AFTER",
    "REPORTS",
    "AsksForRoom",
    "GrowsRoom",
    "KeepsOthers",
    "WatchesCommandLines",
    "WithRoom",
    "WithVariables",
    "describe",
    "exit_with_3",
    "fail_deep_inside",
    "grow",
    "hang",
    "leave_state_behind",
    "raise_deep_inside",
    "report_until_cancelled",
    "report_with_replacement",
    "wait_after_report",
    "wait_in_hang",
]

REPORTS = 3
GROWS_AFTER = 3


def describe(config: dict[str, Any]) -> int:
    """Print, report what this rank is, and save a checkpoint with the last report."""
    facts = return_facts()
    rank = facts["rank"]
    print(f"rank {rank} prints")
    print(f"rank {rank} complains", file=sys.stderr)
    facts["handles_signals"] = facts["is_main_thread"] and _handles_signals()
    facts["working_directory"] = os.getcwd()
    facts["variables"] |= {name: os.environ.get(name) for name in (WithVariables.OF_RUN, WithVariables.OF_RANK)}
    for step in range(1, REPORTS):
        report({"step": step, "facts": facts})
    _save(REPORTS, facts=facts)
    return os.getpid()


def _handles_signals() -> bool:
    received = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: received.set())
    try:
        signal.raise_signal(signal.SIGUSR1)
        return received.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)


def _save(step: int, **metrics: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{get_context().get_world_rank()}.txt").write_text(str(step))
        report({"step": step, **metrics}, Checkpoint.from_directory(directory))


def leave_state_behind() -> bool:
    """Return True if an earlier run has left its state in this process."""
    found = hasattr(sys, "drivetrain_kit_state")
    sys.drivetrain_kit_state = True  # type: ignore[attr-defined]
    return found


def raise_deep_inside() -> None:
    """Raise an exception on the last rank."""
    if get_context().get_world_rank() == get_context().get_world_size() - 1:
        fail_deep_inside(2)


def fail_deep_inside(depth: int) -> None:
    """Raise an exception after a number of nested calls."""
    if depth:
        fail_deep_inside(depth - 1)
    raise LookupError("an exception of this test")


def exit_with_3() -> None:
    """Exit the process of the last rank, while the others wait."""
    if get_context().get_world_rank() == get_context().get_world_size() - 1:
        os._exit(3)
    threading.Event().wait(END_S)


def hang() -> None:
    """Report once, and then wait."""
    report({"step": 1})
    wait_in_hang()


def wait_in_hang() -> None:
    """Wait to be terminated. The stacks of the ranks contain the name of this function."""
    threading.Event().wait(END_S)


def report_until_cancelled() -> None:
    """Report until the run ends this rank."""
    while True:
        report({"pid": os.getpid()})


def wait_after_report() -> None:
    """Report the process id of this rank, and wait to be terminated.

    The wait consists of short steps: a signal that arrives just before a blocking call does not interrupt it.
    """
    deadline = time.monotonic() + 10 * END_S
    report({"pid": os.getpid()})
    while time.monotonic() < deadline:
        time.sleep(0.1)


def report_with_replacement(config: dict[str, Any]) -> int:
    """Report, lose the process of rank 1, and report again when a new process has replaced it.

    Args:
        config: ``"joined"`` is the path of a named pipe. Rank 0 first writes to it for the process that will be lost,
            and then reads from it until the new process has joined.
    """
    is_new = KeepsOthers.VARIABLE in os.environ
    if not is_new:
        report({"step": 1, "pid": os.getpid()})
    pipe = Path(config["joined"])
    if get_context().get_world_rank() == 0:
        pipe.write_text("rank 0 is training, so it can continue if rank 1 is lost")
        pipe.read_text()
    elif is_new:
        pipe.write_text("joined")
    else:
        pipe.read_text()
        os.kill(os.getpid(), signal.SIGKILL)
    report({"step": 2, "pid": os.getpid()})
    return os.getpid()


def grow() -> int:
    """In the first attempt, save until the run gets another worker. Return the number of workers."""
    context = get_context()
    if context.attempt > 0 and context.get_world_size() != 2:
        raise AssertionError(f"expected a group of two workers after it has grown, got {context.get_world_size()}")
    step = first = 0 if get_checkpoint() is None else 1
    while context.attempt == 0 or step <= first:
        step += 1
        _save(step)
    return context.get_world_size()


class WithVariables(Backend):
    """A backend with environment variables, which calls a function on the workers.

    Attributes:
        called: the values that the function has returned, by rank.
    """

    OF_RUN: ClassVar[str] = "DRIVETRAIN_KIT_OF_RUN"
    OF_RANK: ClassVar[str] = "DRIVETRAIN_KIT_OF_RANK"
    name = "with_variables"
    environment: ClassVar[Mapping[str, str]] = {OF_RUN: "of the run"}  # type: ignore[misc]

    def __init__(self) -> None:
        self.called: list[str | None] = []

    def rank_environment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
        return {self.OF_RANK: f"{worker.rank} of {len(workers)}"}

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        self.called = group.run(_read_variable, self.OF_RANK)
        return [{"rank": str(worker.rank)} for worker in group.workers]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        rank = str(context.get_world_rank())
        if rendezvous["rank"] != rank:
            raise AssertionError(f"rank {rank}: expected its own rendezvous, got that of rank {rendezvous['rank']}")
        yield


def _read_variable(name: str) -> str | None:
    return os.environ.get(name)


class KeepsOthers(Backend):
    """A backend whose other ranks continue when the process of a rank is replaced."""

    VARIABLE: ClassVar[str] = "DRIVETRAIN_KIT_REPLACED"
    name = "keeps_others"
    survives_losses = True

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        os.environ.update(rendezvous)
        yield

    def rejoin(self, group: WorkerGroup, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        future: Future[Sequence[Mapping[str, str]]] = Future()
        future.set_result([{self.VARIABLE: "1"} for _ in lost])
        return future


class WithRoom(Runtime):
    """A runtime with room for a number of workers that can be changed.

    Args:
        inner: the runtime that starts the workers.
        space: the number of workers.
    """

    def __init__(self, inner: Runtime, space: int) -> None:
        self._inner = inner
        self.space = space
        self.name, self.in_driver = inner.name, inner.in_driver

    def reduce(self, value: Any) -> Any:
        return self._inner.reduce(value)

    def validate(self, scaling: ScalingConfig) -> None:
        self._inner.validate(scaling)

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.space

    def launch(self, spec: GroupSpec) -> AbstractContextManager[Group]:
        return self._inner.launch(spec)


class GrowsRoom(Callback):
    """Makes room for another worker after some checkpoints.

    Args:
        runtime: the runtime.
    """

    def __init__(self, runtime: WithRoom) -> None:
        self._runtime = runtime
        self._commits = 0

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self._commits += 1
        if self._commits == GROWS_AFTER:
            self._runtime.space += 1


class AsksForRoom(Callback):
    """Asks a runtime for its room.

    Args:
        runtime: the runtime.

    Attributes:
        idle: the room before the workers start.
        running: the room while they are running.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.idle = self.running = 0

    def on_run_start(self, run: Run) -> None:
        self.idle = self._runtime.room(run.scaling_config, (), frozenset())

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self.running = self._runtime.room(run.scaling_config, workers, frozenset())


class WatchesCommandLines(Callback):
    """Looks for tokens on the command lines of all processes, while the workers are running.

    Attributes:
        found: the command lines that contain a token.
        tokens: the random values of the driver that are long enough to be tokens.
    """

    _MIN_BYTES = 16

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.found: list[str] = []

    def record(self, original: Callable[[int], bytes]) -> Callable[[int], bytes]:
        """Return a replacement of ``secrets.token_bytes`` that records the values."""

        def token_bytes(size: int = 32) -> bytes:
            value = original(size)
            self.tokens += [value] if size >= self._MIN_BYTES else []
            return value

        return token_bytes

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        forms = [form for each in self.tokens for form in (each, each.hex().encode(), base64.b64encode(each))]
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # the process has exited
                line = file.read_bytes()
                if any(form in line for form in forms):
                    self.found.append(line.replace(b"\0", b" ").decode(errors="replace"))


class CallsWhenAllReported(Callback):
    """Calls a function with the reported process ids when every rank has reported.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[[list[int]], None]) -> None:
        self._function = function
        self._pids: dict[int, int] = {}
        self._world_size = 0

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self._world_size = len(workers)

    def on_report(self, run: Run, report: Report) -> None:
        if report.rank not in self._pids:
            self._pids[report.rank] = report.metrics["pid"]
            if len(self._pids) == self._world_size:
                self._function(list(self._pids.values()))
