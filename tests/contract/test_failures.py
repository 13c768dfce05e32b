import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import FailureConfig, FailureKind, RemoteError, Result, TrainingFailedError, WorkerDiedError
from drivetrain.plugin import Backend
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import once_on_ray, same_on_ray, with_parent, with_processes
from tests.support import DEADLINE_S, Collector, Pipe, read_lines, release, send_line, wait_for_release


class TwoWordsError(Exception):
    """An exception whose default pickle does not match its constructor."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.words = [first, second]


class SocketError(Exception):
    """An exception that cannot be pickled at all."""

    def __init__(self) -> None:
        import socket

        super().__init__("holds a socket")
        self.socket = socket.socket()


def fail_deep_inside(depth: int) -> None:
    if depth:
        fail_deep_inside(depth - 1)
    raise LookupError("no such thing")


@with_processes
@pytest.mark.parametrize("how", once_on_ray("returns early", "sys.exit(0)", "sys.exit()", "reports fewer times"))
def test_rank_that_exits_before_the_others_never_hangs_the_run(runtime: RuntimeUnderTest, how: str) -> None:
    def train(config: dict) -> None:
        rank = drivetrain.get_context().get_world_rank()
        for step in range(4):
            if rank == 1 and step == 1:
                if config["how"] == "returns early":
                    return
                if config["how"].startswith("sys.exit"):
                    sys.exit(*([0] if "0" in config["how"] else []))
                continue
            drivetrain.report({"step": step, "one": 1}, reduce={"one": "sum"})

    collector = Collector()
    result = runtime.fit(train, {"how": how}, callbacks=[collector])

    assert result.metrics["step"] == 3
    ones = [metrics["one"] for metrics in collector.metrics_of(0)]
    assert ones == ([2, 2, 2, 1] if how == "reports fewer times" else [2, 1, 1, 1])


def test_clean_exit_of_the_only_rank_is_a_success(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        drivetrain.report({"step": 0})
        sys.exit(0)

    result = runtime.fit(train, workers=1)

    assert result.metrics
    assert result.return_value is None


@with_processes
@pytest.mark.parametrize(
    ("how", "exit_code"),
    once_on_ray(("SIGKILL", -signal.SIGKILL), ("os._exit(0)", 0), ("os._exit(3)", 3), ("SIGSEGV", -signal.SIGSEGV)),
)
def test_dead_process_is_a_worker_death_whatever_its_exit_code_and_ends_the_other_ranks(
    runtime: RuntimeUnderTest, gate: Pipe, how: str, exit_code: int
) -> None:
    def train(config: dict) -> None:
        drivetrain.report({"step": 0})
        if drivetrain.get_context().get_world_rank() == 0:
            release(config["gate"])
            signal.pause()
        wait_for_release(config["gate"])
        if config["how"].startswith("os._exit"):
            os._exit(3 if "3" in config["how"] else 0)
        else:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), getattr(signal, config["how"]))

    started = time.monotonic()
    with pytest.raises(TrainingFailedError, match="rank 1") as failed:
        runtime.fit(train, {"how": how, "gate": gate.path})

    assert time.monotonic() - started < DEADLINE_S
    cause = failed.value.__cause__
    assert isinstance(cause, WorkerDiedError)
    assert cause.rank == failed.value.rank == 1
    assert failed.value.kind is FailureKind.INFRASTRUCTURE
    if runtime.supports("parent"):
        assert cause.exit_code == exit_code
    assert Result.from_path(runtime.storage_path / "run").metrics["step"] == 0


def test_exception_keeps_its_type_and_the_frames_of_the_users_functions(
    runtime: RuntimeUnderTest,
) -> None:
    def train() -> None:
        if drivetrain.get_context().get_world_rank() == drivetrain.get_context().get_world_size() - 1:
            fail_deep_inside(2)

    with pytest.raises(TrainingFailedError, match="LookupError: no such thing") as failed:
        runtime.fit(train)

    error, rank = failed.value, runtime.world() - 1
    assert type(error.__cause__) is LookupError
    assert error.__cause__.args == ("no such thing",)
    assert (error.kind, error.rank) == (FailureKind.USER_ERROR, rank)
    assert f"rank {rank}" in str(error)
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    names = [frame.name for frame in frames]
    assert names[-4:] == ["train", "fail_deep_inside", "fail_deep_inside", "fail_deep_inside"]
    assert frames[-1].filename == __file__
    if runtime.has_processes:
        assert names[0] == "train", "frames of the library come before the user's"
    record = json.loads((runtime.storage_path / "run" / "error.json").read_text())
    assert (record["exception"], record["rank"], record["kind"]) == ("LookupError", rank, "user error")
    assert "fail_deep_inside" in (runtime.storage_path / "run" / "error.txt").read_text()
    assert str(Result.from_path(runtime.storage_path / "run").error) == str(error)


@same_on_ray
def test_exception_keeps_its_own_cause(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        try:
            fail_deep_inside(0)
        except LookupError as error:
            raise ValueError("while looking it up") from error

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, workers=1)

    cause = failed.value.__cause__
    assert isinstance(cause, ValueError)
    assert isinstance(cause.__cause__, LookupError)
    assert traceback.extract_tb(cause.__cause__.__traceback__)[-1].name == "fail_deep_inside"


@same_on_ray
def test_exception_whose_init_takes_several_arguments_keeps_its_type_and_attributes(
    runtime: RuntimeUnderTest,
) -> None:
    def train() -> None:
        raise TwoWordsError("bread", "butter")

    with pytest.raises(TrainingFailedError, match="bread and butter") as failed:
        runtime.fit(train, workers=1)

    assert isinstance(failed.value.__cause__, TwoWordsError)
    assert failed.value.__cause__.words == ["bread", "butter"]


@with_processes
def test_exception_that_cannot_be_pickled_is_described_with_its_traceback(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        raise SocketError

    with pytest.raises(TrainingFailedError, match="SocketError: holds a socket") as failed:
        runtime.fit(train, workers=1)

    assert isinstance(failed.value.__cause__, RemoteError)
    assert [frame.name for frame in traceback.extract_tb(failed.value.__cause__.__traceback__)] == ["train"]


@with_processes
def test_exit_with_an_error_code_is_a_failure_of_the_user(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        sys.exit(3)

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train)

    assert isinstance(failed.value.__cause__, SystemExit)
    assert failed.value.__cause__.code == 3


@with_processes
def test_exception_on_one_rank_ends_the_others_without_waiting_for_them(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> None:
        if drivetrain.get_context().get_world_rank() == 0:
            raise ZeroDivisionError
        wait_for_release(config["gate"])

    started = time.monotonic()
    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, {"gate": gate.path})

    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert time.monotonic() - started < DEADLINE_S


@same_on_ray
@pytest.mark.parametrize(("max_failures", "attempts"), [(0, 1), (1, 2)])
def test_failing_run_is_retried_as_often_as_allowed(
    runtime: RuntimeUnderTest, max_failures: int, attempts: int
) -> None:
    def train() -> None:
        raise ValueError(f"attempt {drivetrain.get_context().attempt}")

    collector = Collector()
    with pytest.raises(TrainingFailedError, match=f"attempt {attempts - 1}"):
        runtime.fit(train, failure_config=FailureConfig(max_failures=max_failures), callbacks=[collector])

    assert collector.attempts == len(collector.failures) == attempts


@same_on_ray
def test_run_without_a_limit_of_failures_is_retried_until_it_succeeds(runtime: RuntimeUnderTest) -> None:
    def train() -> int:
        attempt = drivetrain.get_context().attempt
        if attempt < 2:
            raise ValueError
        return attempt

    assert runtime.fit(train, workers=1, failure_config=FailureConfig(max_failures=-1)).return_value == 2


@same_on_ray
def test_failure_config_can_request_the_root_cause_itself(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        fail_deep_inside(0)

    with pytest.raises(LookupError, match="no such thing"):
        runtime.fit(train, failure_config=FailureConfig(fail_fast="raise"))


class FailsInSetup(Backend):
    """Fails on one rank, like a framework whose port is in use."""

    name = "the framework"

    def session(self, context, rendezvous):
        if context.get_world_rank() == context.get_world_size() - 1:
            raise OSError("address already in use")
        return self._enter()

    @contextmanager
    def _enter(self):
        yield


@same_on_ray
def test_backend_failure_on_one_rank_is_an_ordinary_failure_with_its_phase(
    runtime: RuntimeUnderTest,
) -> None:
    def train() -> None:
        pass

    with pytest.raises(TrainingFailedError, match="setting up the framework") as failed:
        runtime.fit(train, backend_config=FailsInSetup())

    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.rank == runtime.world() - 1


@with_parent
def test_last_output_of_a_dead_worker_is_in_the_error(runtime: RuntimeUnderTest, pipe: Pipe) -> None:
    def wait(depth: int) -> None:
        if depth:
            wait(depth - 1)
        time.sleep(DEADLINE_S)

    def abort(depth: int) -> None:
        if depth:
            abort(depth - 1)
        os.abort()

    def train(config: dict) -> None:
        for _ in range(3):  # Python then writes 100 lines of stacks to the log
            threading.Thread(target=wait, args=(20,), daemon=True).start()
        print("my last words", flush=True)
        send_line(config["pipe"], os.getpid())
        abort(20)

    with pytest.raises(TrainingFailedError, match="my last words") as failed:
        runtime.fit(train, {"pipe": pipe.path}, workers=1)

    assert "SIGABRT" in str(failed.value)
    assert "in abort" in str(failed.value)
    assert "in wait" not in str(failed.value)


@with_processes
def test_report_is_kept_when_the_process_dies_right_after_it(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        for step in range(2_000):
            drivetrain.report({"step": step, "text": "x" * 1_000})
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TrainingFailedError):
        runtime.fit(train, workers=1)

    lines = read_lines(runtime.storage_path / "run" / "result.json")
    assert [line["step"] for line in lines] == list(range(2_000))


class DeviceMemoryError(RuntimeError):
    """An exception of a framework."""


class KnowsItsErrors(Backend):
    def session(self, context: Any, rendezvous: Any) -> Any:
        return nullcontext()

    def classify(self, error: BaseException) -> FailureKind | None:
        if isinstance(error, LookupError):
            raise error
        if isinstance(error, ArithmeticError):
            return "arithmetic"  # type: ignore[return-value]
        return FailureKind.OUT_OF_MEMORY if isinstance(error, DeviceMemoryError) else None


@same_on_ray
@pytest.mark.filterwarnings("ignore:backend 'backend' failed in classify")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no more"), FailureKind.OUT_OF_MEMORY),
        (DeviceMemoryError("no more memory on the device"), FailureKind.OUT_OF_MEMORY),
        (KeyError("an error in classify()"), FailureKind.USER_ERROR),
        (ArithmeticError("a wrong result of classify()"), FailureKind.USER_ERROR),
        (OSError(errno.ENOSPC, "No space left on device"), FailureKind.STORAGE),
        (OSError(errno.EBADF, "mine"), FailureKind.USER_ERROR),
    ],
)
def test_exception_is_classified_by_its_type(runtime: RuntimeUnderTest, error: Exception, kind: FailureKind) -> None:
    def train() -> None:
        raise error

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, workers=1, backend_config=KnowsItsErrors())

    assert failed.value.kind is kind
    assert type(failed.value.__cause__) is type(error)
    assert str(failed.value).splitlines()[0].endswith(f"[{kind.value}]")


@with_processes
@same_on_ray
def test_preemptions_have_their_own_budget(runtime: RuntimeUnderTest) -> None:
    """A worker is preempted twice, then the function fails twice; one failure is allowed."""

    def train() -> None:
        attempt = drivetrain.get_context().attempt
        if attempt < 2:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        raise ValueError(f"attempt {attempt}")

    collector = Collector()
    with pytest.raises(TrainingFailedError, match="attempt 3"):
        runtime.fit(train, workers=1, failure_config=FailureConfig(max_failures=1), callbacks=[collector])

    kinds = [failure.kind for failure in collector.failures]
    assert kinds == [FailureKind.PREEMPTION] * 2 + [FailureKind.USER_ERROR] * 2


@same_on_ray
@with_processes
def test_number_of_preemptions_can_be_limited(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    collector = Collector()
    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(
            train,
            workers=1,
            failure_config=FailureConfig(max_failures=5, max_preemptions=1),
            callbacks=[collector],
        )

    assert failed.value.kind is FailureKind.PREEMPTION
    assert collector.attempts == 2


@same_on_ray
def test_result_can_contain_the_error_instead_of_raising_it(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        drivetrain.report({"step": 1})
        raise ValueError(f"attempt {drivetrain.get_context().attempt}")

    trainer = runtime.trainer(train, workers=1, failure_config=FailureConfig(max_failures=1))
    result = trainer.fit(raise_on_failure=False)

    assert isinstance(result.error, TrainingFailedError)
    assert isinstance(result.error.__cause__, ValueError)
    assert result.metrics["step"] == 1


@same_on_ray
def test_files_in_the_run_directory_contain_the_console_messages(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        raise ValueError(f"attempt {drivetrain.get_context().attempt}")

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, workers=1, failure_config=FailureConfig(max_failures=2))

    record = json.loads((runtime.storage_path / "run" / "error.json").read_text())
    assert record["message"] == str(failed.value)
    assert record["message"] in (runtime.storage_path / "run" / "error.txt").read_text()
    assert "attempt 1 failed: rank 0 failed" in record["message"]
    assert "ValueError: attempt 1" in record["message"].partition("attempt 1 failed")[2]
    assert [earlier["summary"][-9:] for earlier in record["earlier_attempts"]] == ["attempt 0", "attempt 1"]
    assert (record["kind"], record["rank"], record["exception"]) == ("user error", 0, "ValueError")


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 300 << 20
OUT_OF_MEMORY_DRIVER = """
import json, os, sys
from pathlib import Path
given = json.loads(sys.argv[1])
Path(given["group"], "cgroup.procs").write_text(str(os.getpid()))
import drivetrain

def train():
    hoard = []
    while True:
        hoard.append(b"x" * (1 << 24))

try:
    drivetrain.DataParallelTrainer(
        train,
        scaling_config=drivetrain.ScalingConfig(num_workers=given["num_workers"], runtime=given["runtime"]),
        run_config=drivetrain.RunConfig(name="run", storage_path=given["storage_path"], verbose=0),
    ).fit()
except drivetrain.TrainingFailedError as error:
    print(error.kind.name, error)
"""


@with_parent
@pytest.mark.skipif(not os.access(MEMORY_GROUPS, os.W_OK), reason="control groups of version 1 are not writable")
def test_process_killed_by_the_kernel_for_its_memory_is_distinguished_from_other_kills(
    runtime: RuntimeUnderTest,
) -> None:
    group = MEMORY_GROUPS / f"drivetrain_{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        driver = runtime.start_driver(OUT_OF_MEMORY_DRIVER, {"group": str(group), "num_workers": 1})
        status, output, errors = driver.wait()
    finally:
        group.rmdir()

    assert status == 0, errors
    assert output.startswith("OUT_OF_MEMORY ")
    assert "was killed by the kernel because memory ran out" in output


@with_parent
def test_process_that_dies_slowly_is_the_cause_of_its_peers_errors(
    runtime: RuntimeUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain._runtimes.local._DEATH_WAIT_S", 60.0)
    monkeypatch.setattr("drivetrain_launch._group._NOTICE_WAIT_S", 60.0)
    line = tmp_path / "line"
    os.mkfifo(line)

    def train() -> None:
        if drivetrain.get_context().get_world_rank() == 1:
            os.open(line, os.O_WRONLY)
            os.closerange(3, 100)  # the kernel also closes descriptors first, and frees the memory afterwards
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        with open(line) as peer:
            peer.read()
        raise ConnectionError("the other rank was lost")

    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train)
    assert (failed.value.kind, failed.value.rank) == (FailureKind.INFRASTRUCTURE, 1)
    assert "SIGKILL" in str(failed.value)
