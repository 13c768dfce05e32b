"""Preemption: a run that must end saves first, every rank after the same step, and is resumed later."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    FailureConfig,
    FailureKind,
    PreemptionInfo,
    Result,
    RunCancelledError,
    TrainContext,
    TrainingFailedError,
    WaitTimeoutError,
)
from drivetrain.plugin import Backend
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import once_on_ray, same_on_ray, with_parent, with_processes
from tests.support import Collector, Pipe, open_pipe, release, send_line, wait_for_release

STEPS = 30


def save(step: int) -> None:
    rank = drivetrain.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{rank}.json").write_text(json.dumps(step))
        drivetrain.report({"step": step}, Checkpoint.from_directory(directory))


def restored() -> int:
    rank = drivetrain.get_context().get_world_rank()
    if (checkpoint := drivetrain.get_checkpoint()) is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(json.loads(Path(directory, f"rank_{rank}.json").read_text()))


def train(config: dict) -> str:
    """Save only when preempted; report once it has polled."""
    first = step = restored()
    while config["endless"] or step < STEPS:
        step += 1
        if (info := drivetrain.get_preemption_info()) is not None:
            assert isinstance(info, PreemptionInfo)
            send_line(config["notified"], info.reason)
            if config.get("stubborn"):
                wait_for_release(config["gate"])
            save(step)
            drivetrain.resume_later()
            return "notified"
        if step == first + 1:
            drivetrain.report({"step": step})
    return f"from {first}"


def train_in_step(config: dict) -> tuple[int, int]:
    """Every step waits for the other rank, as a collective does."""
    context = drivetrain.get_context()
    rank, gates = context.get_world_rank(), config["gates"]
    first = step = restored()
    while context.attempt == 0 or step < first + 5:
        step += 1
        if context.attempt == 0 and (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        with open(gates[1 - rank], "wb", buffering=0) as other:
            other.write(b".")
        wait_for_release(gates[rank])
        if drivetrain.get_preemption_info() is not None:
            send_line(config["notified"], step)
            save(step)
            drivetrain.resume_later()
            return first, step
    return first, step


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[Pipe]:
    with open_pipe(tmp_path / "notified") as made:
        yield made


@with_processes
def test_all_ranks_are_notified_at_the_same_step_and_the_run_resumes_there(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe, notified: Pipe
) -> None:
    collector = Collector()
    config = {"gates": [pipe.path, gate.path], "notified": notified.path}
    result = runtime.fit(train_in_step, config, callbacks=[collector])

    steps = [int(line) for line in notified.receive(2)]
    assert len(set(steps)) == 1
    assert steps[0] >= 5
    assert result.return_value == (steps[0], steps[0] + 5)
    assert [failure.kind for failure in collector.failures] == [FailureKind.PREEMPTION]
    assert "rank 1 received SIGTERM" in collector.failures[0].summary


class LoadsLate(Backend):
    """Rank 1 waits for the test while it loads its task."""

    name = "late"

    def __init__(self, gate: str) -> None:
        self.gate = gate

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Any) -> Iterator[None]:
        yield

    def __reduce__(self) -> tuple[Any, ...]:
        return load_late, (self.gate,)


def load_late(gate: str) -> LoadsLate:
    if os.environ.get("RANK") == "1":
        wait_for_release(gate)
    return LoadsLate(gate)


@with_processes
@same_on_ray
def test_rank_that_still_loads_its_task_takes_part_in_the_agreement(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> str:
        context = drivetrain.get_context()
        if context.attempt:
            return "again"
        drivetrain.get_preemption_info()
        if context.get_world_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        while drivetrain.get_preemption_info() is None:
            pass
        if context.get_world_rank() == 0:
            release(config["gate"])
            release(config["gate"])  # for the next attempt
        drivetrain.resume_later()
        return "notified"

    collector = Collector()
    result = runtime.fit(train, {"gate": gate.path}, backend_config=LoadsLate(gate.path), callbacks=[collector])

    assert result.return_value == "again"
    assert ["after the same step" in failure.summary for failure in collector.failures] == [True]


@with_processes
def test_rank_that_does_not_return_is_terminated_after_the_grace_period(
    runtime: RuntimeUnderTest, gate: Pipe, notified: Pipe
) -> None:
    def train_without_returning(config: dict) -> str:
        if drivetrain.get_context().attempt:
            return "again"
        drivetrain.get_preemption_info()
        if drivetrain.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(config)

    collector = Collector()
    result = runtime.fit(
        train_without_returning,
        {"endless": True, "stubborn": True, "notified": notified.path, "gate": gate.path},
        callbacks=[collector],
        failure_config=FailureConfig(preemption_grace_s=0.3),
    )

    assert result.return_value == "again"
    assert [failure.kind for failure in collector.failures] == [FailureKind.PREEMPTION]
    assert "ranks [0, 1] did not return within 0.3 s" in collector.failures[0].summary


def train_until_notified(config: dict) -> int:
    """Take one step after another until the notice, which rank 1 causes in the first attempt; then save and return."""
    context = drivetrain.get_context()
    step = restored()
    while context.attempt == 0:
        step += 1
        if (context.get_world_rank(), step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        if drivetrain.get_preemption_info() is not None:
            save(step)
            break
    if context.get_world_rank() in config["unfinished"] and context.attempt == 0:
        drivetrain.resume_later()
    return context.attempt


@with_processes
def test_function_that_returns_after_a_notice_has_finished(
    runtime: RuntimeUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    result = runtime.fit(train_until_notified, {"unfinished": []})

    assert result.return_value == 0
    assert result.completed
    assert Result.from_path(result.path).completed
    assert "[DT-421] the train function has finished: ranks [0, 1] returned right after" in capsys.readouterr().err


@with_processes
@same_on_ray
def test_one_rank_that_resumes_later_makes_all_ranks_continue(runtime: RuntimeUnderTest) -> None:
    assert runtime.fit(train_until_notified, {"unfinished": [1]}).return_value == 1


def test_function_cannot_resume_later_without_a_notice(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        drivetrain.get_preemption_info()
        drivetrain.resume_later()

    with pytest.raises(TrainingFailedError, match=r"\[DT-420\] resume_later\(\)"):
        runtime.fit(train, workers=1)


@with_processes
def test_signal_to_a_child_of_the_train_function_does_not_preempt_the_worker(runtime: RuntimeUnderTest) -> None:
    """The workers of a data loader, forked from the worker, are terminated with SIGTERM."""

    def train() -> str:
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        other.terminate()
        assert other.wait() == -signal.SIGTERM
        return f"{os.waitstatus_to_exitcode(status)} {drivetrain.get_preemption_info()}"

    assert runtime.fit(train, workers=1).return_value == f"-{int(signal.SIGTERM)} None"


@with_processes
def test_function_may_handle_the_signal_itself(runtime: RuntimeUnderTest) -> None:
    def train() -> str:
        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        os.kill(os.getpid(), signal.SIGTERM)
        assert received.wait(10)
        return "mine"

    assert runtime.fit(train, workers=1).return_value == "mine"


@with_processes
@same_on_ray
def test_library_that_ignores_the_signal_does_not_hide_it_from_a_function_that_polls(
    runtime: RuntimeUnderTest,
) -> None:
    def train() -> bool:
        if drivetrain.get_context().attempt:
            return True
        ctypes.CDLL(None).signal(
            int(signal.SIGTERM), ctypes.c_void_p(1)
        )  # ignore the signal without Python's knowledge
        assert drivetrain.get_preemption_info() is None
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 30
        while drivetrain.get_preemption_info() is None:
            assert time.monotonic() < end
        drivetrain.resume_later()
        return False

    assert runtime.fit(train, workers=1).return_value is True


DRIVER = """
import json, sys
import drivetrain
from tests.contract.test_preemption import train
from tests.support import send_line

given = json.loads(sys.argv[1])

class NotifyReports(drivetrain.Callback):
    def on_report(self, run, report):
        send_line(given["pipe"], report.rank)

result = drivetrain.DataParallelTrainer(
    train,
    train_loop_config=given,
    scaling_config=drivetrain.ScalingConfig(num_workers=given["num_workers"], runtime=given["runtime"]),
    run_config=drivetrain.RunConfig(
        name="run", storage_path=given["storage_path"], resume="auto", callbacks=[NotifyReports()]
    ),
).fit()
print(result.return_value)
"""


def exit_status(runtime: RuntimeUnderTest, status: int) -> int:
    """Return the exit status of a driver ended by KeyboardInterrupt, which Ray's exit handlers change to 1."""
    return status if status >= 0 or runtime.supports("exit status") else 1


@pytest.mark.parametrize(
    ("number", "status"), once_on_ray((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT))
)
def test_terminated_driver_saves_first_and_the_next_driver_resumes(
    runtime: RuntimeUnderTest, pipe: Pipe, notified: Pipe, number: signal.Signals, status: int
) -> None:
    given = {"pipe": pipe.path, "notified": notified.path}
    driver = runtime.start_driver(DRIVER, {**given, "endless": True})
    pipe.receive(runtime.world())
    os.kill(driver.process.pid, number)
    reasons = notified.receive(runtime.world())
    code, output, errors = driver.wait()

    assert code == exit_status(runtime, status), errors
    assert output == ""
    assert "asking all ranks to save and exit at the same step" in errors
    assert 'run the script again with RunConfig(name="run", resume="auto")' in errors
    if number == signal.SIGINT:
        assert len(errors.partition("Traceback")[2].splitlines()) < 12, errors
    assert len(set(reasons)) == 1
    driver.wait_until_nothing_is_left()
    found = Result.from_path(runtime.storage_path / "run")
    assert found.checkpoint is not None
    assert found.error is None
    assert not found.completed

    again = runtime.start_driver(DRIVER, {**given, "endless": False})
    code, output, errors = again.wait()
    assert code == 0, errors
    assert output == f"from {found.metrics['step']}\n"


@pytest.mark.parametrize(("number", "status"), once_on_ray((signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)))
def test_second_request_ends_the_run_at_once(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe, notified: Pipe, number: signal.Signals, status: int
) -> None:
    given = {"pipe": pipe.path, "notified": notified.path, "gate": gate.path, "endless": True, "stubborn": True}
    driver = runtime.start_driver(DRIVER, given)
    pipe.receive(runtime.world())
    os.kill(driver.process.pid, number)
    notified.receive(runtime.world())
    os.kill(driver.process.pid, number)
    code, _, errors = driver.wait()

    assert code == exit_status(runtime, status), errors
    driver.wait_until_nothing_is_left()
    assert Result.from_path(runtime.storage_path / "run").checkpoint is None


@same_on_ray
def test_signal_that_comes_too_late_for_the_function_still_ends_the_driver(
    runtime: RuntimeUnderTest, pipe: Pipe, notified: Pipe, gate: Pipe
) -> None:
    """The function has polled, and then only waits and returns."""
    source = DRIVER.replace("import train\n", "import train_and_poll_once as train\n")
    driver = runtime.start_driver(source, {"pipe": pipe.path, "gate": gate.path})
    pipe.receive(runtime.world())
    driver.process.send_signal(signal.SIGTERM)
    gate.release(runtime.world())
    code, output, errors = driver.wait()

    assert code == 143, errors
    assert output == ""
    found = Result.from_path(runtime.storage_path / "run")
    assert found.error is None
    assert found.completed, "the function returned, so it has finished"


def train_and_poll_once(config: dict) -> None:
    assert drivetrain.get_preemption_info() is None
    drivetrain.report({"asked": True})
    wait_for_release(config["gate"])


def test_background_run_can_be_awaited(runtime: RuntimeUnderTest) -> None:
    def train() -> str:
        drivetrain.report({"step": 1})
        return "done"

    run = runtime.trainer(train, workers=1).start()

    assert run.result(60).return_value == "done"
    assert run.done()
    assert run.result().metrics["step"] == 1


def test_error_of_a_background_run_is_raised_when_awaited(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        raise ValueError("mine")

    run = runtime.trainer(train, workers=1).start()

    with pytest.raises(TrainingFailedError, match="mine"):
        run.result(60)


def train_until_cancelled(config: dict) -> str:
    """Work in steps; notify the test at the start, and poll for preemptions if configured."""
    step = restored()
    send_line(config["pipe"], f"from {step}")
    while True:
        step += 1
        drivetrain.report({"step": step})
        if config["polls"] and drivetrain.get_preemption_info() is not None:
            save(step)
            drivetrain.resume_later()
            return "saved"


@same_on_ray
@pytest.mark.parametrize("polls", [True, False])
def test_cancelled_run_saves_if_it_can_and_is_resumed(runtime: RuntimeUnderTest, pipe: Pipe, polls: bool) -> None:
    collector = Reported()
    trainer = runtime.trainer(train_until_cancelled, {"pipe": pipe.path, "polls": polls}, callbacks=[collector])
    run = trainer.start()
    pipe.receive(runtime.world())
    assert collector.reported.wait(30)
    with pytest.raises(WaitTimeoutError, match="it continues"):
        run.result(0.01)

    run.cancel()

    with pytest.raises(RunCancelledError):
        run.result(60)
    found = Result.from_path(runtime.storage_path / "run")
    assert (found.checkpoint is not None) is polls
    again = runtime.trainer(train_until_cancelled, {"pipe": pipe.path, "polls": polls}, resume="auto").start()
    lines = set(pipe.receive(runtime.world()))
    assert lines == ({f"from {found.metrics['step']}"} if polls else {"from 0"})
    again.cancel()
    again.cancel()
    with pytest.raises(RunCancelledError):
        again.result(60)


class Reported(Collector):
    """Notifies the test when rank 0 has reported more than once, and so has polled before."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = threading.Event()

    def on_report(self, run: Any, report: Any) -> None:
        if report.rank == 0 and report.iteration > 2:
            self.reported.set()


@with_parent
def test_signal_handlers_are_restored(runtime: RuntimeUnderTest) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    during: list[Any] = []

    class Looks(Collector):
        def on_report(self, run: Any, report: Any) -> None:
            during.extend(signal.getsignal(number) for number in numbers)

    runtime.fit(lambda: drivetrain.report({}), workers=1, callbacks=[Looks()])

    assert [signal.getsignal(number) for number in numbers] == before
    assert during != before


def test_poll_outside_a_train_function_is_refused() -> None:
    with pytest.raises(drivetrain.SessionError, match="get_preemption_info"):
        drivetrain.get_preemption_info()
