"""A shared run that contains an example of everything, and a copy of it for tests that modify it."""

import math
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from tests.browser import Browser, browsing
from tests.support import open_pipe, release, wait_for_release

STEPS = 60
GATE = "DRIVETRAIN_TEST_GATE"  # the path of the gate; not in the configuration, which the tests show


def train_with_accidents(config: dict[str, int]) -> None:
    """Lose a process at step 25, raise at step 45, and report a loss that is not finite at step 33.

    An accident waits until the other rank has made the same step, so that all earlier checkpoints are committed. The
    other rank makes no further step, because its checkpoints would be committed, too.
    """
    context = drivetrain.get_context()
    step, rank = 0, context.get_world_rank()
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            step = int(pathlib.Path(directory, "step").read_text())
    while step < config["steps"]:
        step += 1
        loss = math.nan if step == 33 else 2 / step + 0.1 * rank
        metrics = {"step": step, "loss": loss, "note": "<b>bold</b></script><script>alert(1)</script>"}
        if step % 10 == 0 and rank == 0:
            with tempfile.TemporaryDirectory() as made:
                pathlib.Path(made, "step").write_text(str(step))
                pathlib.Path(made, "weights").write_bytes(b"w" * 1000 * step)
                drivetrain.report(metrics, Checkpoint.from_directory(made))
        else:
            drivetrain.report(metrics)
        struck = {(0, 25): 1, (1, 45): 0}.get((context.attempt, step))
        if struck == rank:
            wait_for_release(os.environ[GATE])
            if rank == 0:
                raise ValueError("no such column: price")
            os.kill(os.getpid(), signal.SIGKILL)
        elif struck is not None:
            release(os.environ[GATE])
            signal.pause()  # until the driver ends the attempt


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two runs: ``story`` with two failures, and ``plain`` with none. Tests must not modify it."""
    place = tmp_path_factory.mktemp("runs")
    gate = tmp_path_factory.mktemp("gate") / "gate"
    common = {"storage_path": str(place), "verbose": 0}
    with open_pipe(gate), pytest.MonkeyPatch.context() as patch:
        patch.setenv(GATE, str(gate))
        for name, steps, retries in (("plain", 5, 0), ("story", STEPS, 3)):
            DataParallelTrainer(
                train_with_accidents,
                train_loop_config={"steps": steps},
                scaling_config=ScalingConfig(num_workers=2, runtime="local"),
                run_config=RunConfig(
                    name=name,
                    failure_config=FailureConfig(max_failures=retries),
                    checkpoint_config=CheckpointConfig(num_to_keep=3),
                    **common,
                ),
            ).fit()
    return place


@pytest.fixture
def story(runs: Path) -> Result:
    """The run with the failures. Tests must not modify it."""
    return Result.from_path(runs / "story")


@pytest.fixture
def own_runs(runs: Path, tmp_path: Path) -> Path:
    """A copy of both runs, which a test may modify."""
    shutil.copytree(runs, tmp_path / "own_runs")
    return tmp_path / "own_runs"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser; tests that use it are skipped if there is none."""
    with browsing(tmp_path_factory.mktemp("profile")) as started:
        yield started
