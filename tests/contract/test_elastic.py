"""An elastic run uses the workers that there is room for, and adapts when the room changes."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from drivetrain._runtimes.local import LocalRuntime
from drivetrain.plugin import WorkerInfo
from tests.support import DEADLINE_S, Collector, Pipe, wait_for_release

STEPS = 40


class ResizableMachine(LocalRuntime):
    """This machine, with room for the number of workers that the test sets."""

    def __init__(self, space: int) -> None:
        self.space = space

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.space


class Sizes(Collector):
    """Records the number of workers of each attempt, and runs a change once, at a commit."""

    def __init__(self, at: int = 0, change: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._at = at
        self._change = change

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        super().on_checkpoint(run, checkpoint)
        if checkpoint.number == self._at:
            self._change()

    def on_group_start(self, run: Any, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        super().on_group_start(run, attempt, workers)
        assert [worker.rank for worker in workers] == list(range(len(workers)))
        self.sizes.append(len(workers))


def train(config: dict) -> list[int]:
    """Rank 0 saves every step; rank 1 dies at one step, once the test permits it."""
    context = drivetrain.get_context()
    rank, step = context.get_world_rank(), 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            step = json.loads(Path(directory, "step.json").read_text())
    first = step
    while step < STEPS or (config.get("until_it_grows") and context.attempt == 0):
        step += 1
        if rank == 1 and step == config.get("die_at") and context.attempt == 0:
            wait_for_release(config["gate"])
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step.json").write_text(str(step))
            drivetrain.report({"step": step}, Checkpoint.from_directory(directory) if rank == 0 else None)
    return [first, context.get_world_size()]


def fit(
    tmp_path: Path,
    rooms: ResizableMachine,
    sizes: Sizes,
    bounds: tuple[int, int],
    config: dict | None = None,
    **options: Any,
) -> Result:
    return DataParallelTrainer(
        train,
        train_loop_config=config or {},
        scaling_config=ScalingConfig(num_workers=bounds, runtime=rooms, elastic_resize_monitor_interval_s=0.001),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[sizes], **options),
    ).fit()


def test_run_grows_right_after_a_commit_and_repeats_no_step(tmp_path: Path) -> None:
    rooms = ResizableMachine(1)
    sizes = Sizes(5, lambda: setattr(rooms, "space", 3))
    result = fit(tmp_path, rooms, sizes, (1, 3), {"until_it_grows": True})

    assert sizes.sizes == [1, 3]
    first, world_size = result.return_value
    assert world_size == 3
    assert first >= 5
    assert sizes.failures == []
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "result.json").read_text().splitlines()]
    assert steps == list(range(1, max(first, STEPS) + 1))


def train_and_poll(config: dict) -> list[int]:
    """Save once early, and then only on request."""
    step = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        step = checkpoint.get_metadata()["step"]
    first = step
    while step < first + 10 or drivetrain.get_context().attempt == 0:
        step += 1
        preempted = drivetrain.get_preemption_info() is not None
        if preempted or step == 1:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state").touch()
                checkpoint = Checkpoint.from_directory(directory)
                checkpoint.set_metadata({"step": step})
                drivetrain.report({"step": step, "preempted": preempted}, checkpoint)
        if preempted:
            drivetrain.resume_later()
            return []
    return [first, drivetrain.get_context().get_world_size()]


def test_run_that_polls_for_preemptions_saves_before_it_grows(tmp_path: Path) -> None:
    rooms = ResizableMachine(1)
    sizes = Sizes(1, lambda: setattr(rooms, "space", 2))
    result = DataParallelTrainer(
        train_and_poll,
        scaling_config=ScalingConfig(num_workers=(1, 2), runtime=rooms, elastic_resize_monitor_interval_s=0.001),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[sizes]),
    ).fit()

    assert sizes.sizes == [1, 2]
    assert sizes.failures == []
    first, world_size = result.return_value
    assert world_size == 2
    reports = [json.loads(line) for line in (tmp_path / "run" / "result.json").read_text().splitlines()]
    assert [line["step"] for line in reports if line["preempted"]] == [first]
    assert first > 1


def test_run_stops_growing_at_its_maximum(tmp_path: Path) -> None:
    sizes = Sizes()
    result = fit(tmp_path, ResizableMachine(9), sizes, (1, 2))

    assert sizes.sizes == [2]
    assert result.return_value == [0, 2]


def test_run_continues_with_fewer_workers_after_a_loss(tmp_path: Path, gate: Pipe) -> None:
    rooms = ResizableMachine(3)

    def shrink() -> None:
        rooms.space = 2
        gate.release()

    sizes = Sizes(5, shrink)
    config = {"die_at": 10, "gate": gate.path}
    result = fit(tmp_path, rooms, sizes, (1, 3), config, failure_config=FailureConfig(max_failures=1))

    assert sizes.sizes == [3, 2]
    first, world_size = result.return_value
    assert world_size == 2
    assert first >= 5
    assert len(sizes.failures) == 1


def test_run_waits_for_its_minimum(tmp_path: Path) -> None:
    """The runtime gets a request for the minimum, and waits for it as for any number."""
    sizes = Sizes()
    fit(tmp_path, ResizableMachine(0), sizes, (2, 3))

    assert sizes.sizes == [2]


@pytest.mark.parametrize("bounds", [(0, 2), (3, 2), (1, 2, 3), (1.5, 2)])
def test_invalid_bounds_are_refused(bounds: Any) -> None:
    with pytest.raises(ConfigurationError, match="num_workers"):
        ScalingConfig(num_workers=bounds)


@pytest.mark.ray
def test_run_on_ray_uses_free_resources_and_grows_when_more_become_free(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr("drivetrain_ray._cluster._PLACEMENT_TRIAL_S", 5)  # Ray is slow on a busy machine
    total = int(ray.cluster_resources()["CPU"])
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    assert group.wait(30)
    deadline = time.monotonic() + DEADLINE_S
    while (
        ray.available_resources().get("CPU", 0) != total - 2
    ):  # Ray may still be freeing the resources of another test
        assert time.monotonic() < deadline, ray.available_resources()
    sizes = Sizes(5, lambda: ray.util.remove_placement_group(group))  # half of the cluster was busy
    result = DataParallelTrainer(
        train,
        train_loop_config={"until_it_grows": True},
        scaling_config=ScalingConfig(num_workers=(1, total + 4), runtime="ray", elastic_resize_monitor_interval_s=0.05),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[sizes]),
    ).fit()

    assert sizes.sizes[0] == total - 2
    assert sizes.sizes[-1] == total
    first, world_size = result.return_value
    assert world_size == total
    assert first >= 5
