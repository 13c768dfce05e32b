"""The runtime ``command`` with a real Slurm: two workers on two nodes."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain_launch import CommandRuntime
from tests.launch.conftest import list_jobs, wait_for_empty_queue
from tests.support import Collector, Driver, Pipe, wait_for_release, wait_until_exited

# Both nodes are this machine. A host name of their own makes them two nodes for drivetrain as well.
ON_TWO_NODES = "srun --quiet -N 2 -n {n} unshare --uts sh -c 'hostname $SLURMD_NODENAME && exec {worker}'"

WAIT = """
import json, os, signal, sys
from drivetrain_launch import CommandRuntime
from drivetrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from tests.support import send_line

given = json.loads(sys.argv[1])

def train():
    send_line(given["pipe"], os.getpid())
    send_line(given["pipe"], os.environ["SLURM_JOB_ID"])
    while True:
        signal.pause()  # returns when SIGTERM arrives

DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2, runtime=CommandRuntime(given["command"])),
    run_config=RunConfig(name="run", storage_path=given["storage_path"], verbose=0, start_timeout_s=180,
        failure_config=FailureConfig(max_preemptions=0)),
).fit()
"""


@pytest.fixture
def start(
    environment: Mapping[str, str], start_driver: Callable[..., Driver], tmp_path: Path, pipe: Pipe
) -> Callable[[str], Driver]:
    """Start a driver whose train function waits, with a command."""

    def start(command: str) -> Driver:
        return start_driver(WAIT, {"command": command, "pipe": pipe.path, "storage_path": str(tmp_path)}, environment)

    return start


def trainer(function: Callable[..., Any], directory: Path, command: str, **options: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2, runtime=CommandRuntime(command)),
        run_config=RunConfig(name="run", storage_path=directory, verbose=0, **{"start_timeout_s": 180, **options}),
    )


class ReleaseAfterTwoCheckpoints(Collector):
    """Releases the worker that kills itself once its second checkpoint is committed."""

    def __init__(self, gate: Pipe) -> None:
        super().__init__()
        self.gate = gate

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        super().on_checkpoint(run, checkpoint)
        if len(self.checkpoints) == 2:
            self.gate.release()


def count_to_four_and_die_once(config: dict[str, Any]) -> list[str]:
    context = drivetrain.get_context()
    start = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, f"rank_{context.get_world_rank()}").read_text()) + 1
    for step in range(start, 4):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank_{context.get_world_rank()}").write_text(str(step))
            drivetrain.report({"step": step, "start": start}, Checkpoint.from_directory(directory))
        if step == 1 and context.attempt == 0:
            if context.get_world_rank() == 1:
                wait_for_release(config["gate"])
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
    return [os.environ[name] for name in ("SLURMD_NODENAME", "SLURM_STEP_ID", "SLURM_JOB_ID", "NODE_RANK")]


def test_two_workers_on_two_nodes_report_and_resume_after_a_kill(
    environment: Mapping[str, str], tmp_path: Path, pipe: Pipe
) -> None:
    collector = ReleaseAfterTwoCheckpoints(pipe)
    options = {"failure_config": FailureConfig(max_failures=1), "callbacks": [collector]}

    result = trainer(partial(count_to_four_and_die_once, {"gate": pipe.path}), tmp_path, ON_TWO_NODES, **options).fit()

    (failure,) = collector.failures
    assert failure.rank == 1
    assert "was killed by SIGKILL" in failure.summary
    assert failure.node_id == "n2"
    assert [metrics["step"] for metrics in collector.metrics_of(0)] == [0, 1, 2, 3]
    assert result.metrics["start"] == 2
    assert result.checkpoint is not None
    node, step, _, node_rank = result.return_value
    assert (node, step, node_rank) == ("n1", "0", "0"), "the second attempt used the same job step"
    wait_for_empty_queue()


def test_scancel_is_a_preemption_and_leaves_nothing(start: Callable[[str], Driver], pipe: Pipe) -> None:
    driver = start(ON_TWO_NODES)
    lines = [int(line) for line in pipe.receive(4)]
    (job,) = (line.split()[0] for line in list_jobs())

    subprocess.run(["scancel", job], check=True)

    status, _, errors = driver.wait()
    assert status == 1
    assert "received SIGTERM" in errors
    assert f"[{FailureKind.PREEMPTION.value}]" in errors
    wait_until_exited(number for number in lines if number != int(job))
    driver.wait_until_nothing_is_left()
    wait_for_empty_queue()


@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_end_of_the_driver_ends_the_job(start: Callable[[str], Driver], pipe: Pipe, end: str) -> None:
    driver = start(ON_TWO_NODES)
    lines = [int(line) for line in pipe.receive(4)]
    (job,) = (line.split()[0] for line in list_jobs())

    getattr(driver, end)()

    driver.wait()
    wait_until_exited(number for number in lines if number != int(job))
    driver.wait_until_nothing_is_left()
    wait_for_empty_queue()


def test_kill_9_of_the_driver_cancels_a_job_that_waits_in_the_queue(start: Callable[[str], Driver]) -> None:
    driver = start("srun --begin=now+1hour -n {n} {worker}")
    assert driver.process.stderr is not None
    assert "queued and waiting for resources" in driver.process.stderr.readline()

    driver.kill()

    driver.wait_until_nothing_is_left()
    wait_for_empty_queue()


def test_message_of_srun_is_in_the_error(environment: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"exited with code 1; .*invalid partition"):
        trainer(print, tmp_path, "srun --partition=none -n {n} {worker}").fit()


def test_job_that_waits_in_the_queue_for_too_long_is_cancelled(environment: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match="queued and waiting for resources"):
        trainer(print, tmp_path, "srun --begin=now+1hour -n {n} {worker}", start_timeout_s=15).fit()

    wait_for_empty_queue()
