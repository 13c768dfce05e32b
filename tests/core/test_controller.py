"""The state machine of a run, driven by lists of events instead of processes."""

import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerDiedError,
)
from drivetrain._storage.filesystem import StoredFile
from drivetrain._wire.commands import RunningTaskCommand
from drivetrain._wire.events import Event, Exited, Failed, PhaseEntered, RankState, Reported, Returned
from drivetrain.plugin import Runtime, WorkerInfo
from tests.support import Collector

TRAINING = RankState.TRAINING


class ScriptedGroup:
    """Workers with a script of events, delivered one list at a time."""

    def __init__(self, world_size: int, script: Sequence[Sequence[Event]], nodes: Sequence[str] = ()) -> None:
        self.workers = tuple(
            WorkerInfo(rank=rank, local_rank=rank, node_rank=0, node_id=node, hostname=node, ip="127.0.0.1", pid=1)
            for rank, node in enumerate(nodes or ["here"] * world_size)
        )
        self._script = deque([[PhaseEntered(worker.rank, TRAINING, 0.0) for worker in self.workers], *script])

    def run(self, fn: Callable[..., Any], /, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return [fn(*args) for _ in (self.workers if ranks is None else ranks)]

    def train(self, tasks: Sequence[Any]) -> None:
        assert [task.context.get_world_rank() for task in tasks] == [worker.rank for worker in self.workers]

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        raise AssertionError("no rank makes a request")

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        if not self._script:
            assert timeout_s is not None, "no event is left, so this would wait forever"
            return
        for event in self._script.popleft():
            if deliver(event):
                return

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        return {}


class ScriptedRuntime(Runtime):
    """A runtime with one script per attempt."""

    name = "scripted"

    def __init__(self, world_size: int, *attempts: Sequence[Sequence[Event]], nodes: Sequence[str] = ()) -> None:
        self.world_size = world_size
        self._nodes = nodes
        self._attempts = deque(attempts)
        self.avoided: list[set[str]] = []

    def validate(self, scaling: ScalingConfig) -> None:
        pass

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.world_size

    @contextlib.contextmanager
    def launch(self, spec: Any) -> Iterator[ScriptedGroup]:
        self.avoided.append(set(spec.avoided))
        yield ScriptedGroup(self.world_size, self._attempts.popleft(), self._nodes)


def report(rank: int, number: int, *, reduce: dict[str, str] | None = None, **metrics: float) -> Reported:
    return Reported(rank, number, number, float(number), metrics, None, reduce)


def fit(tmp_path: Path, runtime: ScriptedRuntime, **run_config: Any) -> Result:
    return DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=runtime.world_size, runtime=runtime),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, **run_config),
    ).fit()


def test_death_of_a_process_is_the_cause_of_the_exceptions_that_it_triggers_elsewhere(tmp_path: Path) -> None:
    script = [[Failed(0, 1.0, TRAINING, ConnectionResetError("lost the other rank"))], [Exited(1, -9, "")]]

    with pytest.raises(TrainingFailedError, match="rank 1: the worker process was killed by SIGKILL") as failed:
        fit(tmp_path, ScriptedRuntime(2, script))

    assert isinstance(failed.value.__cause__, WorkerDiedError)
    assert failed.value.kind is FailureKind.INFRASTRUCTURE
    assert "also: rank 0 failed" in str(failed.value)


def test_earliest_exception_is_the_cause_whichever_arrives_first(tmp_path: Path) -> None:
    script = [[Failed(0, 2.0, TRAINING, TimeoutError())], [Failed(1, 1.0, TRAINING, KeyError("the reason"))]]

    with pytest.raises(TrainingFailedError) as failed:
        fit(tmp_path, ScriptedRuntime(2, script))

    assert isinstance(failed.value.__cause__, KeyError)
    assert failed.value.rank == 1


def test_clock_an_hour_behind_on_one_node_does_not_change_the_cause(tmp_path: Path) -> None:
    now = time.time()
    script = [
        [Failed(0, now, TRAINING, KeyError("the reason"))],
        [Failed(1, now - 3600.0, TRAINING, ConnectionResetError("lost the other rank"))],
    ]

    with pytest.raises(TrainingFailedError) as failed:
        fit(tmp_path, ScriptedRuntime(2, script, nodes=["here", "there"]))

    assert isinstance(failed.value.__cause__, KeyError)
    assert failed.value.rank == 0


def test_full_disk_in_a_logger_is_a_storage_failure_and_is_retried(tmp_path: Path) -> None:
    class HasFullDisk(Collector):
        def on_report(self, run: Any, report: Any) -> None:
            if self.attempts == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    script = [[report(0, 1), report(1, 1)], [Returned(0, None), Returned(1, None)]]
    watch = HasFullDisk()
    fit(
        tmp_path,
        ScriptedRuntime(2, script, script),
        callbacks=[watch],
        failure_config=FailureConfig(max_failures=1),
    )

    assert [(failure.kind, failure.rank) for failure in watch.failures] == [(FailureKind.STORAGE, None)]


def test_exit_of_a_process_whose_function_has_returned_is_not_a_failure(tmp_path: Path) -> None:
    script = [[Returned(1, None), Exited(1, 1, "")], [Returned(0, None)]]

    assert fit(tmp_path, ScriptedRuntime(2, script)).error is None


def test_reports_of_rank_0_keep_their_order_while_one_waits_to_be_combined(tmp_path: Path) -> None:
    script = [
        [report(0, 1, reduce={"loss": "sum"}, loss=1.0), report(0, 2, loss=5.0), report(0, 3, loss=6.0)],
        [report(1, 1, loss=2.0)],
        [Returned(0, None), Returned(1, None)],
    ]
    collector = Collector()
    result = fit(tmp_path, ScriptedRuntime(2, script), callbacks=[collector])

    assert [metrics["loss"] for metrics in collector.metrics_of(0)] == [3.0, 5.0, 6.0]
    assert result.metrics["_training_iteration"] == 3


def test_report_waiting_to_be_combined_is_kept_when_the_other_rank_dies(tmp_path: Path) -> None:
    script = [[report(0, 1, reduce={"loss": "sum"}, loss=1.0)], [Exited(1, 1, "")]]

    with pytest.raises(TrainingFailedError):
        fit(tmp_path, ScriptedRuntime(2, script))

    metrics = Result.from_path(tmp_path / "run").metrics
    assert metrics["loss"] == 1.0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_metrics_of_a_checkpoint_are_combined_once_in_whichever_order_the_ranks_report(
    tmp_path: Path, order: Sequence[int]
) -> None:
    def save(rank: int) -> Reported:
        event = report(rank, 1, reduce={"correct": "sum", "loss": "mean"}, correct=10 + rank, loss=float(rank))
        files: dict[str, StoredFile] = {}
        return event._replace(files=files, directory="checkpoint_000001", checkpoint_ranks=(0,)) if not rank else event

    script = [[save(rank) for rank in order], [Returned(rank, None) for rank in range(3)]]
    collector = Collector()
    result = fit(tmp_path, ScriptedRuntime(3, script), callbacks=[collector])

    ((_, metrics),) = result.best_checkpoints
    assert (metrics["correct"], metrics["loss"]) == (33, 1.0)
    assert [(each["correct"], each["loss"]) for each in collector.metrics_of(0)] == [(33, 1.0)]


def test_custom_policy_decides_about_the_next_attempt(tmp_path: Path) -> None:
    class OnlyDeaths:
        def decide(self, failure: Any, history: Any) -> bool:
            return failure.kind is FailureKind.INFRASTRUCTURE

    dies, fails = [[Exited(1, -9, "")]], [[Failed(1, 1.0, TRAINING, ValueError("mine"))]]
    collector = Collector()
    with pytest.raises(TrainingFailedError, match="mine"):
        fit(
            tmp_path,
            ScriptedRuntime(2, dies, dies, fails, fails),
            failure_config=FailureConfig(policy=OnlyDeaths()),
            callbacks=[collector],
        )

    assert collector.attempts == 3


def test_stop_waits_only_for_earlier_reports(tmp_path: Path) -> None:
    script = [
        [report(0, 1, loss=1.0), report(1, 1, loss=1.0)],
        [report(0, 2, loss=0.0, enough=1.0), report(0, 3, reduce={"loss": "mean"}, loss=9.0)],
    ]

    result = fit(tmp_path, ScriptedRuntime(2, script), stop={"enough": 1.0})

    assert result.metrics["loss"] == 0.0


def test_error_during_termination_does_not_hide_the_earlier_failure(tmp_path: Path) -> None:
    class EndsBadly(ScriptedRuntime):
        @contextlib.contextmanager
        def launch(self, spec: Any) -> Iterator[ScriptedGroup]:
            with super().launch(spec) as group:
                yield group
            raise OSError("the group cannot be ended")

    script = [[Failed(1, 1.0, TRAINING, ValueError("mine"))]]
    with pytest.raises(TrainingFailedError, match=r"rank 1 .*mine") as failed:
        fit(tmp_path, EndsBadly(2, script))
    assert isinstance(failed.value.__cause__, ValueError)


def test_error_in_launch_names_the_runtime(tmp_path: Path) -> None:
    class Breaks(ScriptedRuntime):
        def launch(self, spec: Any) -> Any:
            raise KeyError("region")

    with pytest.raises(TrainingFailedError, match="runtime 'scripted' failed in launch: KeyError: 'region'") as failed:
        fit(tmp_path, Breaks(2))

    assert isinstance(failed.value.__cause__, KeyError)


@pytest.mark.parametrize(("limit", "avoided"), [(2, [set(), set(), {"here"}]), (None, [set(), set(), set()])])
def test_node_is_avoided_after_too_many_lost_processes(
    tmp_path: Path, limit: int | None, avoided: list[set[str]]
) -> None:
    dies, works = [[Exited(1, -9, "")]], [[Returned(0, None), Returned(1, None)]]
    runtime = ScriptedRuntime(2, dies, dies, works)
    fit(tmp_path, runtime, failure_config=FailureConfig(max_failures=2, max_node_failures=limit))

    assert runtime.avoided == avoided
