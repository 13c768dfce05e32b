"""An elastic run takes the workers that there is room for, and follows it when the room changes."""

import json
import os
import signal
import tempfile
from collections.abc import Sequence
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
    WorkerInfo,
)
from drivetrain.runtime.local import LocalRuntime
from tests.support import Collector

STEPS = 40


class Rooms(LocalRuntime):
    """This machine, with as much room as a file says."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.asked: list[int] = []

    def room(self, scaling: ScalingConfig, running: int) -> int:
        self.asked.append(running)
        return int(self.file.read_text())


class Sizes(Collector):
    """The number of workers of each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_group_start(self, run: Any, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        super().on_group_start(run, attempt, workers)
        assert [worker.rank for worker in workers] == list(range(len(workers)))
        self.sizes.append(len(workers))


def train(config: dict) -> list[int]:
    """Rank 0 saves every step; the room changes at a step, and a rank dies at another."""
    context = drivetrain.get_context()
    rank, step = context.get_world_rank(), 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            step = json.loads(Path(directory, "step.json").read_text())
    first = step
    while step < STEPS or (config.get("until_it_grows") and context.attempt == 0):
        step += 1
        if rank == 0 and step == config.get("change_at"):
            Path(config["room"] + ".new").write_text(str(config["change_to"]))
            os.replace(config["room"] + ".new", config["room"])  # the driver may be reading it
        if rank == 1 and step == config.get("die_at") and context.attempt == 0:
            manifest = Path(config["room"]).parent / "run" / "manifest.json"
            while Path(config["room"]).read_text() != str(config["change_to"]):
                pass  # until rank 0 is there
            while not manifest.exists() or "checkpoint_" not in manifest.read_text():
                pass  # until all ranks have reported so far
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step.json").write_text(str(step))
            drivetrain.report({"step": step}, Checkpoint.from_directory(directory) if rank == 0 else None)
    return [first, context.get_world_size()]


def fit(tmp_path: Path, room: int, bounds: tuple[int, int], config: dict, **options: Any) -> tuple[Result, Sizes]:
    file = tmp_path / "room"
    file.write_text(str(room))
    sizes = Sizes()
    result = DataParallelTrainer(
        train,
        train_loop_config={"room": str(file), **config},
        scaling_config=ScalingConfig(num_workers=bounds, runtime=Rooms(file), elastic_resize_monitor_interval_s=0.01),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[sizes], **options),
    ).fit()
    return result, sizes


def test_run_grows_right_after_a_commit_and_repeats_no_step(tmp_path: Path) -> None:
    result, sizes = fit(tmp_path, 1, (1, 3), {"change_at": 5, "change_to": 3})

    assert sizes.sizes == [1, 3]
    first, world_size = result.return_value
    assert world_size == 3
    assert 1 <= first < STEPS
    assert sizes.failures == []
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "result.json").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def train_and_ask(config: dict) -> list[int]:
    """Saves once early, and then only when it is told to."""
    step = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        step = checkpoint.get_metadata()["step"]
    first = step
    while step < first + 10 or drivetrain.get_context().attempt == 0:
        step += 1
        told = drivetrain.get_preemption_info() is not None
        if told or step == 2:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state").touch()
                checkpoint = Checkpoint.from_directory(directory)
                checkpoint.set_metadata({"step": step})
                drivetrain.report({"step": step, "told": told}, checkpoint)
        if told:
            return []
    return [first, drivetrain.get_context().get_world_size()]


def test_run_that_asks_for_preemptions_saves_before_it_grows(tmp_path: Path) -> None:
    file = tmp_path / "room"
    file.write_text("1")

    class Grows(Sizes):
        def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
            super().on_checkpoint(run, checkpoint)
            file.write_text("2")

    sizes = Grows()
    result = DataParallelTrainer(
        train_and_ask,
        scaling_config=ScalingConfig(num_workers=(1, 2), runtime=Rooms(file), elastic_resize_monitor_interval_s=0.001),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[sizes]),
    ).fit()

    assert sizes.sizes == [1, 2]
    assert sizes.failures == []
    first, world_size = result.return_value
    assert world_size == 2
    told = [json.loads(line) for line in (tmp_path / "run" / "result.json").read_text().splitlines()]
    assert [line["step"] for line in told if line["told"]] == [first]
    assert first > 2


def test_run_takes_no_more_than_its_maximum_and_stops_looking_there(tmp_path: Path) -> None:
    result, sizes = fit(tmp_path, 9, (1, 2), {})

    assert sizes.sizes == [2]
    assert result.return_value == [0, 2]


def test_run_goes_on_with_fewer_workers_where_some_are_lost(tmp_path: Path) -> None:
    result, sizes = fit(
        tmp_path,
        3,
        (1, 3),
        {"change_at": 5, "change_to": 2, "die_at": 10},
        failure_config=FailureConfig(max_failures=1),
    )

    assert sizes.sizes == [3, 2]
    first, world_size = result.return_value
    assert world_size == 2
    assert first > 0
    assert len(sizes.failures) == 1


def test_run_waits_for_its_minimum(tmp_path: Path) -> None:
    """The runtime is asked for that many, and waits for them as for any number."""
    _, sizes = fit(tmp_path, 0, (2, 3), {})

    assert sizes.sizes[0] == 2


@pytest.mark.parametrize("bounds", [(0, 2), (3, 2), (1, 2, 3), (1.5, 2)])
def test_bounds_that_make_no_sense_are_refused(bounds: Any) -> None:
    with pytest.raises(ConfigurationError, match="num_workers"):
        ScalingConfig(num_workers=bounds)


class Unoccupied(Sizes):
    """Frees what keeps half of the cluster busy, once the run has begun."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        import ray

        if checkpoint.index == 5:
            ray.util.remove_placement_group(self.group)


@pytest.mark.ray
def test_run_on_ray_takes_what_is_free_and_grows_when_more_becomes_free(ray_address: str, tmp_path: Path) -> None:
    import ray

    total = int(ray.cluster_resources()["CPU"])
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    assert group.wait(30)
    sizes = Unoccupied(group)
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
