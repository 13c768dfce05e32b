"""The train functions and callbacks of the conformance kits. Workers import this module, so it does not import pytest.

A train function computes a state whose value is known for every step, so that a resumed run can be checked.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drivetrain import Callback, Checkpoint, get_checkpoint, get_context, get_preemption_info, report, resume_later
from drivetrain.plugin import Report, Run, WorkerInfo
from drivetrain.plugin.callbacks import CommittedCheckpoint
from drivetrain_testing._leftovers import exits

__all__ = [
    "END_S",
    "KILLED_AFTER",
    "STEPS",
    "KillsRank",
    "MeetsOther",
    "Observer",
    "do_nothing",
    "expected_state",
    "find_running",
    "raise_on_last_rank",
    "resume_after_a_kill",
    "return_facts",
    "save_when_preempted",
    "train",
    "wait_to_be_killed",
]

END_S = 20.0
"""Seconds within which a process must exit."""

STEPS = 4
KILLED_AFTER = 2
_MODULUS = 1_000_003

AllSum = Callable[[float], float] | None


class Observer(Callback):
    """Records what a run does, and the process ids of its workers."""

    def __init__(self) -> None:
        self.workers: list[Sequence[WorkerInfo]] = []
        self.reports: dict[int, list[dict[str, Any]]] = {}
        self.checkpoints: list[CommittedCheckpoint] = []
        self.failures: list[Any] = []

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self.workers.append(tuple(workers))

    def on_report(self, run: Run, report: Report) -> None:
        self.reports.setdefault(report.rank, []).append(report.metrics)

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self.checkpoints.append(checkpoint)

    def on_failure(self, run: Run, failure: Any, retrying: bool) -> None:
        self.failures.append(failure)

    def find_running(self) -> list[int]:
        """Return the ids of the worker processes that do not exit in time."""
        return find_running({worker.pid for workers in self.workers for worker in workers} - {os.getpid()})


class KillsRank(Callback):
    """Kills the process of rank 1 in the first attempt, when the checkpoint of a step has been committed."""

    def __init__(self) -> None:
        self._pid = 0
        self._commits = 0

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self._pid = workers[1].pid if attempt == 0 else 0

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self._commits += 1
        if self._pid and self._commits == KILLED_AFTER:
            os.kill(self._pid, signal.SIGKILL)


class MeetsOther(Callback):
    """Waits at the first report until the other of two runs has also reported, so that they run at the same time.

    Args:
        barrier: a barrier for both runs.
    """

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self._has_met = False

    def on_report(self, run: Run, report: Report) -> None:
        if not self._has_met:
            self._has_met = True
            self._barrier.wait()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if error is not None:
            self._barrier.abort()


def find_running(pids: Iterable[int]) -> list[int]:
    """Return the ids of processes that do not exit in time."""
    deadline = time.monotonic() + END_S
    return sorted(pid for pid in set(pids) if not exits(pid, deadline - time.monotonic()))


def expected_state(rank: int, steps: int, world_size: int, *, sums: bool) -> int:
    """Return the state of a rank after a number of steps.

    Args:
        rank: the rank.
        steps: the number of steps.
        world_size: the number of ranks.
        sums: True if the ranks sum their values in each step.
    """
    state = 0
    for step in range(1, steps + 1):
        values = [_value(each, step) for each in range(world_size)]
        state = (3 * state + (sum(values) if sums else values[rank])) % _MODULUS
    return state


def _value(rank: int, step: int) -> int:
    return rank + 1 + step % 7


def _advance(state: int, step: int, all_sum: AllSum) -> int:
    value = _value(get_context().get_world_rank(), step)
    return (3 * state + (value if all_sum is None else round(all_sum(float(value))))) % _MODULUS


def _save(step: int, state: int, **metrics: Any) -> None:
    """Report a checkpoint to which each rank contributes one file."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, f"rank_{get_context().get_world_rank()}.json")
        file.write_text(json.dumps({"step": step, "state": state}))
        report({"step": step, "state": state, **metrics}, Checkpoint.from_directory(directory))


def _restore() -> tuple[int, int]:
    """Return the step and the state of this rank in the latest checkpoint."""
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0, 0
    with checkpoint.as_directory() as directory:
        saved = json.loads(Path(directory, f"rank_{get_context().get_world_rank()}.json").read_text())
    return saved["step"], saved["state"]


def do_nothing() -> None:
    """Return at once."""


def return_facts() -> dict[str, Any]:
    """Return what a rank can see of its place among the ranks."""
    context = get_context()
    return {
        "rank": context.get_world_rank(),
        "world_size": context.get_world_size(),
        "is_main_thread": threading.current_thread() is threading.main_thread(),
        "pid": os.getpid(),
        "worker_pid": context.worker.pid,
        "variables": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    }


def train(config: dict[str, Any]) -> dict[str, int]:
    """Train without a disturbance. Each rank saves its state in every step, and reports its facts with it."""
    first, state = _restore()
    for step in range(first + 1, STEPS + 1):
        state = _advance(state, step, config["all_sum"])
        _save(step, state, facts=return_facts())
    return {"first": first, "state": state}


def resume_after_a_kill(config: dict[str, Any]) -> dict[str, int]:
    """Train, but wait in the first attempt until rank 1 is killed by :class:`KillsRank`. A single rank raises."""
    first, state = _restore()
    for step in range(first + 1, STEPS + 1):
        state = _advance(state, step, config["all_sum"])
        _save(step, state)
        if get_context().attempt == 0 and step == KILLED_AFTER:
            if get_context().get_world_size() == 1:
                raise ZeroDivisionError("the only rank raises in this test")
            wait_to_be_killed(config)
    return {"first": first, "state": state}


def save_when_preempted(config: dict[str, Any]) -> dict[str, Any]:
    """Train until the ranks are preempted, which rank 1 causes. The next attempt continues for one step."""
    context = get_context()
    step, state = first, _ = _restore()
    while context.attempt == 0 or step <= first:
        step += 1
        state = _advance(state, step, config["all_sum"])
        if context.attempt == 0 and (context.get_world_rank(), step) == (1, KILLED_AFTER):
            os.kill(os.getpid(), signal.SIGTERM)
        if get_preemption_info() is not None:
            _save(step, state)
            resume_later()
            return {}
    return {"first": first, "steps": _saved_steps(), "state": state}


def _saved_steps() -> list[int]:
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as directory:
        return [json.loads(file.read_text())["step"] for file in sorted(Path(directory).glob("rank_*.json"))]


def raise_on_last_rank(config: dict[str, Any]) -> None:
    """Raise an exception on the last rank, while the others wait."""
    if get_context().get_world_rank() == get_context().get_world_size() - 1:
        raise ZeroDivisionError("the last rank raises in this test")
    wait_to_be_killed(config)


def wait_to_be_killed(config: dict[str, Any]) -> None:
    """Wait until this process is killed. Rank 0 waits in a collective operation, if the backend has one."""
    if config["all_sum"] is not None and get_context().get_world_rank() == 0:
        config["all_sum"](0.0)
    threading.Event().wait(END_S)
    raise TimeoutError(f"this rank was not killed within {END_S:g} s")
