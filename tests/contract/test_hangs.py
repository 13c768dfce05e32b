"""A run that hangs fails with the state of each rank; the stacks of a running job can be requested at any time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import drivetrain
from drivetrain import FailureConfig, FailureKind, TrainingFailedError, WaitTimeoutError
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import driver_only, with_processes
from tests.support import DEADLINE_S, Collector, Pipe, send_line, wait_for_release

# A machine may stall for longer than the timeout. A run that treats progress as a hang would fail three times.
ALLOWS_STALLS = FailureConfig(max_failures=2)


def wait_forever(path: str) -> None:
    wait_for_release(path)


def announce_and_wait(pipe: str, gate: str) -> None:
    send_line(pipe, "here")
    wait_for_release(gate)


def train_until_stuck(config: dict) -> int:
    """Rank 1 blocks after its first report, in the first attempt."""
    context = drivetrain.get_context()
    for step in range(3):
        if context.attempt == 0 and context.get_world_rank() == 1 and step == 1:
            if config.get("how") == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            wait_forever(config["gate"])
        drivetrain.report({"step": step})
    if context.attempt == 0 and context.get_world_rank() == 0:
        wait_forever(config["gate"])  # as in a collective
    return context.attempt


@with_processes
@driver_only
def test_run_without_a_report_for_too_long_fails_with_the_state_of_every_rank(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train_until_stuck, {"gate": gate.path}, hang_timeout_s=2.0)

    assert failed.value.kind is FailureKind.HANG
    cause = failed.value.__cause__
    assert isinstance(cause, WaitTimeoutError)
    assert cause.ranks == (0, 1)
    message = str(cause)
    assert "RunConfig.hang_timeout_s" in message
    assert "3 by rank 0, 1 by rank 1" in message
    assert "rank 1 (process" in message
    assert message.count("in wait_forever") == 2


def train_unequally(config: dict) -> int:
    """Rank 1 blocks after its first report; rank 0 continues to report."""
    rank = drivetrain.get_context().get_world_rank()
    drivetrain.report({"step": 0})
    if rank == 1:
        wait_forever(config["gate"])
    while True:
        drivetrain.report({"step": 1})
        time.sleep(0.02)


@with_processes
@driver_only
def test_rank_that_hangs_while_others_report_is_named(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train_unequally, {"gate": gate.path}, hang_timeout_s=6.0)
    assert failed.value.kind is FailureKind.HANG
    assert "heartbeat from rank 1, although other ranks make progress" in str(failed.value)


def train_without_reports(config: dict) -> str:
    """Make progress of one kind for longer than the timeout, and report only at the end."""
    shard = drivetrain.get_dataset_shard("train")
    signs = {
        "heartbeat": drivetrain.heartbeat,
        "poll": drivetrain.get_preemption_info,
        "shard": lambda: next(iter(shard.iter_batches(batch_size=1))),
    }
    until = time.monotonic() + 6
    while time.monotonic() < until:
        signs[config["sign"]]()
        time.sleep(0.02)
    drivetrain.report({"step": 0})
    return "done"


@driver_only
@with_processes
@pytest.mark.parametrize("sign", ["heartbeat", "poll", "shard"])
def test_function_that_makes_progress_without_reports_is_not_terminated(runtime: RuntimeUnderTest, sign: str) -> None:
    datasets = {"train": {"x": np.arange(100)}}
    result = runtime.fit(
        train_without_reports, {"sign": sign}, datasets=datasets, hang_timeout_s=4, failure_config=ALLOWS_STALLS
    )
    assert result.return_value == "done"


def train_on_rank_0_only_reports(config: dict) -> str:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        if drivetrain.get_context().get_world_rank() == 0:
            drivetrain.report({"step": 0})
        time.sleep(0.02)
    return "done"


@driver_only
@with_processes
def test_rank_that_leaves_the_reports_to_rank_0_is_not_terminated(runtime: RuntimeUnderTest) -> None:
    result = runtime.fit(train_on_rank_0_only_reports, {}, hang_timeout_s=4, failure_config=ALLOWS_STALLS)
    assert result.return_value == "done"


@with_processes
def test_stopped_rank_is_distinguished_from_a_waiting_rank(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train_until_stuck, {"gate": gate.path, "how": "stop"}, hang_timeout_s=2.0)

    message = str(failed.value.__cause__)
    assert "is stopped (SIGSTOP)" in message
    assert message.count("in wait_forever") == 1


@with_processes
@driver_only
@pytest.mark.parametrize("how", ["wait", "stop"])
def test_hung_run_is_retried_within_the_same_budget(
    runtime: RuntimeUnderTest, gate: Pipe, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    collector = Collector()
    result = runtime.fit(
        train_until_stuck,
        {"gate": gate.path, "how": how},
        hang_timeout_s=5.0,
        failure_config=FailureConfig(max_failures=1),
        callbacks=[collector],
    )

    assert result.return_value == 1
    assert [failure.kind for failure in collector.failures] == [FailureKind.HANG]
    assert "in wait_forever" in capsys.readouterr().err


@driver_only
@with_processes
def test_slow_run_that_makes_progress_is_not_ended(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> int:
        if drivetrain.get_context().get_world_rank() == 1:
            wait_for_release(config["gate"])  # this rank never reports, the other one does
            return 1
        for step in range(8):
            time.sleep(0.5)  # the pace itself is tested
            drivetrain.report({"step": step})
        with open(config["gate"], "wb", buffering=0) as pipe:
            pipe.write(b".")
        return 0

    result = runtime.fit(train, {"gate": gate.path}, hang_timeout_s=3.0, failure_config=ALLOWS_STALLS)
    assert result.return_value == 0


DRIVER = """
import json, sys
import drivetrain
from tests.contract.test_hangs import announce_and_wait

given = json.loads(sys.argv[1])

def train(config):
    announce_and_wait(config["pipe"], config["gate"])

drivetrain.DataParallelTrainer(
    train,
    train_loop_config=given,
    scaling_config=drivetrain.ScalingConfig(num_workers=given["num_workers"], runtime=given["runtime"]),
    run_config=drivetrain.RunConfig(name="run", storage_path=given["storage_path"], verbose=0),
).fit()
"""


def stacks(run: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "drivetrain"), "stacks", str(run)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env={**os.environ, **environment},
    )


def test_command_shows_the_stacks_of_a_running_job(runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe) -> None:
    driver = runtime.start_driver(DRIVER, {"pipe": pipe.path, "gate": gate.path})
    pipe.receive(runtime.world())

    by_path = stacks(runtime.storage_path / "run")
    by_name = stacks("run", DRIVETRAIN_STORAGE_PATH=str(runtime.storage_path))

    for finished in (by_path, by_name):
        assert finished.returncode == 0, finished.stderr
        assert "in announce_and_wait" in finished.stdout
        for rank in range(runtime.world()):
            assert f"rank {rank} (process" in finished.stdout
    gate.release(runtime.world())
    assert driver.wait()[0] == 0
    after = stacks(runtime.storage_path / "run")
    assert after.returncode == 1
    assert "a run whose driver is running on this machine" in after.stderr


def test_command_refuses_a_directory_without_a_run(tmp_path: Path) -> None:
    finished = stacks(tmp_path / "nothing")

    assert finished.returncode == 3
    assert "expected the directory or name of a run" in finished.stderr
