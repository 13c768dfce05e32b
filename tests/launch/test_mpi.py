"""The runtime ``command`` with Open MPI's ``mpirun``."""

import os
import signal
from pathlib import Path

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from drivetrain_launch import CommandRuntime
from tests.support import Collector


def train() -> str:
    context = drivetrain.get_context()
    drivetrain.report({"attempt": context.attempt})
    if context.attempt == 0 and context.get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["OMPI_COMM_WORLD_SIZE"]


@pytest.mark.usefixtures("mpirun")
@pytest.mark.parametrize("passes_token", ["by environment", "by file"])
def test_two_workers_of_mpirun_train_and_are_restarted_after_a_kill(tmp_path: Path, passes_token: str) -> None:
    collector = Collector()
    runtime = CommandRuntime(
        "mpirun --bind-to none -n {n} {worker}", token_directory=tmp_path if passes_token == "by file" else None
    )

    result = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, runtime=runtime),
        run_config=RunConfig(
            name="run",
            storage_path=tmp_path,
            verbose=0,
            start_timeout_s=180,
            failure_config=FailureConfig(max_failures=1),
            callbacks=[collector],
        ),
    ).fit()

    assert result.return_value == "2"
    assert result.metrics["attempt"] == 1
    (failure,) = collector.failures
    assert "was killed by SIGKILL" in failure.summary
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
