"""Runs of one user on one machine train on different GPUs. The GPUs are imitated: no worker touches them."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    ResourceError,
    RunConfig,
    ScalingConfig,
)
from drivetrain._storage.holder import own_facts
from drivetrain.plugin import Report
from drivetrain.plugin.backends import gpu_holders
from drivetrain.plugin.runtimes import GroupSpec, LocalRuntime
from drivetrain_console import main
from tests.support import DEADLINE_S, Driver, Pipe, open_pipe, send_line, wait_for_release

FOUR = ("0", "1", "2", "3")


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRIVETRAIN_GPU_RESERVATIONS", str(tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield
    while _started:
        _started.pop().cancel()


_started: list["Started"] = []


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    with open_pipe(tmp_path / "pipe") as made:
        yield made


def show_gpus_and_wait(config: dict[str, str]) -> None:
    """Send the run's name and the worker's GPUs to the test, and wait until the test releases the worker."""
    context = drivetrain.get_context()
    send_line(config["pipe"], f"{context.get_experiment_name()} {os.environ['CUDA_VISIBLE_DEVICES']}")
    wait_for_release(config["gate"])


class Started:
    """A run whose workers wait until the test lets them return."""

    def __init__(self, name: str, directory: Path, function: Callable[..., None], scaling: ScalingConfig) -> None:
        self._workers = scaling.max_workers
        self._gate = Pipe(directory / f"gate-{name}")
        self._handle = DataParallelTrainer(
            function,
            train_loop_config={"pipe": str(directory / "pipe"), "gate": self._gate.path},
            scaling_config=scaling,
            run_config=RunConfig(
                name=name,
                storage_path=directory / "runs",
                verbose=0,
                failure_config=FailureConfig(max_failures=1),
            ),
        ).start()
        self.cancel = self._handle.cancel
        _started.append(self)

    def result(self) -> drivetrain.Result:
        return self._handle.result(timeout_s=DEADLINE_S)

    def finish(self) -> None:
        self._gate.release(self._workers)
        self.result()
        self._gate.close()


def start(
    name: str,
    directory: Path,
    *,
    workers: int | tuple[int, int] = 2,
    each: float = 1,
    runtime: LocalRuntime | None = None,
    function: Callable[..., None] = show_gpus_and_wait,
) -> Started:
    return Started(
        name,
        directory,
        function,
        ScalingConfig(
            num_workers=workers,
            use_gpu=True,
            resources_per_worker={"GPU": each},
            runtime=runtime or LocalRuntime(gpus=FOUR),
        ),
    )


def gpus_of(lines: list[str], run: str) -> list[str]:
    return sorted(line.partition(" ")[2] for line in lines if line.startswith(f"{run} "))


def wait_for_output(capfd: pytest.CaptureFixture[str], text: str) -> str:
    """Return what was written to stderr up to now, once it contains the text."""
    deadline, errors = time.monotonic() + DEADLINE_S, ""
    while text not in errors:
        assert time.monotonic() < deadline, errors
        time.sleep(0.05)
        errors += capfd.readouterr().err
    return errors


def test_runs_use_different_gpus_and_the_next_one_waits_until_enough_are_free(
    tmp_path: Path, pipe: Pipe, capfd: pytest.CaptureFixture[str]
) -> None:
    first = start("first", tmp_path)
    lines = pipe.receive(2)
    second = start("second", tmp_path, workers=1)
    lines += pipe.receive(1)
    third = start("third", tmp_path)
    errors = wait_for_output(capfd, "waiting")

    assert (gpus_of(lines, "first"), gpus_of(lines, "second")) == (["0", "1"], ["2"])
    assert "third: waiting for 2 of 4 GPUs. GPU 0: run first (process" in errors
    assert "GPU 2: run second (process" in errors
    assert [(holder.gpu, holder.run) for holder in gpu_holders()] == [("0", "first"), ("1", "first"), ("2", "second")]

    second.finish()
    assert gpus_of(pipe.receive(2), "third") == ["2", "3"]
    first.finish()
    third.finish()
    assert gpu_holders() == []


def test_run_that_must_not_wait_is_refused_before_anything_is_started(tmp_path: Path, pipe: Pipe) -> None:
    first = start("first", tmp_path, workers=3)
    pipe.receive(3)

    with pytest.raises(ResourceError, match=r"DT-312\] 2 GPUs: expected .* which has 4, but .* GPU 0: run first \("):
        start("second", tmp_path, runtime=LocalRuntime(gpus=FOUR, wait=False)).result()
    assert not (tmp_path / "runs" / "second").exists()
    first.finish()


def test_wait_for_gpus_ends_when_the_run_is_cancelled(
    tmp_path: Path, pipe: Pipe, capfd: pytest.CaptureFixture[str]
) -> None:
    first = start("first", tmp_path, workers=4)
    pipe.receive(4)
    second = start("second", tmp_path, workers=1)
    wait_for_output(capfd, "waiting")

    second.cancel()
    with pytest.raises(drivetrain.RunCancelledError):
        second.result()
    first.finish()


OTHER = """
import json, os, sys
from pathlib import Path
from drivetrain.plugin.runtimes import LocalRuntime
from tests.core.test_gpu_reservations import start
from tests.support import wait_for_release

arguments = json.loads(sys.argv[1])
runtime = LocalRuntime(gpus=["0", "1"])
run = start("other", Path(arguments["directory"]), runtime=runtime)
wait_for_release(arguments["fork_gate"])
if os.fork() == 0:
    os.setsid()
    wait_for_release(arguments["fork_gate"])
    os._exit(0)
run.result()
"""


def test_gpus_of_a_killed_driver_are_free_at_once_even_if_a_child_of_it_lives(tmp_path: Path, pipe: Pipe) -> None:
    with open_pipe(tmp_path / "fork_gate") as fork_gate:
        arguments = {"directory": str(tmp_path), "fork_gate": fork_gate.path}
        other = Driver(tmp_path, OTHER, arguments, {})
        try:
            assert gpus_of(pipe.receive(2), "other") == ["0", "1"]
            fork_gate.release()
            deadline = time.monotonic() + DEADLINE_S
            while not any(_is_child(pid, other.process.pid) for pid in other.offspring()):
                assert time.monotonic() < deadline
            other.kill()

            following = start("next", tmp_path, runtime=LocalRuntime(gpus=["0", "1"], wait=False))
            assert gpus_of(pipe.receive(2), "next") == ["0", "1"]
            assert {holder.run for holder in gpu_holders()} == {"next"}
            following.finish()
        finally:
            other.clean_up()


def _is_child(pid: int, parent: int) -> bool:
    """Return True for a child that leads a session of its own and runs the script of its parent."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"driver_script.py" in command and os.getsid(pid) == pid != parent
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_gpus_that_the_user_selects_are_used_without_waiting(
    tmp_path: Path, pipe: Pipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start("first", tmp_path)
    pipe.receive(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    second = start("second", tmp_path, runtime=LocalRuntime())

    assert gpus_of(pipe.receive(2), "second") == ["1", "3"]
    assert "second: CUDA_VISIBLE_DEVICES selects GPUs that another run uses. GPU 1: run first" in capfd.readouterr().err
    assert [(holder.gpu, holder.run) for holder in gpu_holders()] == [
        ("0", "first"),
        ("1", "first"),
        ("1", "second"),
        ("3", "second"),
    ]
    first.finish()
    second.finish()


def test_runs_with_fractions_share_a_gpu_only_if_no_other_is_free(tmp_path: Path, pipe: Pipe) -> None:
    runs, found = [], []
    for name in ("a", "b", "c"):
        runs.append(start(name, tmp_path, workers=2, each=0.5, runtime=LocalRuntime(gpus=["0", "1"], wait=False)))
        found.append(gpus_of(pipe.receive(2), name))
    with pytest.raises(ResourceError, match="DT-312"):
        start("whole", tmp_path, workers=1, runtime=LocalRuntime(gpus=["0", "1"], wait=False)).result()

    assert found == [["0", "0"], ["1", "1"], ["0", "0"]]
    for run in runs:
        run.finish()


def fail_once(config: dict[str, str]) -> None:
    if drivetrain.get_checkpoint() is None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").touch()
            drivetrain.report({"attempt": 0}, checkpoint=Checkpoint(directory))
        os.kill(os.getpid(), signal.SIGKILL)
    show_gpus_and_wait(config)


def test_run_keeps_its_gpus_between_attempts_although_another_run_waits(
    tmp_path: Path, pipe: Pipe, capfd: pytest.CaptureFixture[str]
) -> None:
    first = start("first", tmp_path, workers=3)
    pipe.receive(3)
    failing = start("failing", tmp_path, workers=1, function=fail_once)

    assert gpus_of(pipe.receive(1), "failing") == ["3"]
    waiting = start("waiting", tmp_path, workers=1)
    wait_for_output(capfd, "waiting: waiting for 1 of 4 GPUs")
    first.finish()
    failing.finish()
    pipe.receive(1)
    waiting.finish()


def test_elastic_run_starts_with_as_many_workers_as_there_are_free_gpus(tmp_path: Path, pipe: Pipe) -> None:
    first = start("first", tmp_path, workers=1)
    pipe.receive(1)
    elastic = start("elastic", tmp_path, workers=(1, 4))

    assert gpus_of(pipe.receive(3), "elastic") == ["1", "2", "3"]
    first.finish()
    elastic.finish()


def test_elastic_run_starts_with_the_gpus_that_another_run_has_left_in_the_meantime(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = LocalRuntime(gpus=FOUR)
    launch, rivals, rival_has_gpus = runtime.launch, [], threading.Event()

    def launch_after_another(spec: GroupSpec) -> Any:
        if not rivals:
            rivals.append(start("rival", tmp_path, workers=3))
            assert rival_has_gpus.wait(DEADLINE_S)
        return launch(spec)

    monkeypatch.setattr(runtime, "launch", launch_after_another)
    elastic = start("elastic", tmp_path, workers=(1, 4), runtime=runtime)
    assert len(gpus_of(pipe.receive(3), "rival")) == 3
    rival_has_gpus.set()

    assert gpus_of(pipe.receive(1), "elastic") == ["3"]
    rivals[0].finish()
    elastic.finish()


def test_run_that_a_callback_starts_shares_the_gpus_of_its_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = []

    class Evaluates(Callback):
        def on_report(self, run: Any, report: Report) -> None:
            found.append(fit_once("inner").metrics)

    def fit_once(name: str, *callbacks: Callback) -> drivetrain.Result:
        return DataParallelTrainer(
            report_gpus,
            scaling_config=ScalingConfig(num_workers=1, use_gpu=True, runtime=LocalRuntime(gpus=["0"])),
            run_config=RunConfig(name=name, storage_path=tmp_path, verbose=0, callbacks=list(callbacks)),
        ).fit()

    outer = fit_once("outer", Evaluates())

    assert (outer.metrics["gpus"], found[0]["gpus"]) == ("0", "0")
    assert "inner: this run shares GPUs with another run of the same thread. GPU 0: run outer" in capfd.readouterr().err


def report_gpus() -> None:
    drivetrain.report({"gpus": os.environ["CUDA_VISIBLE_DEVICES"]})


def test_facts_of_an_earlier_boot_hold_nothing(tmp_path: Path) -> None:
    facts = {**own_facts(), "machine": "another boot/pid:[1]", "run": "old", "gpu": "0", "scope": ""}
    directory = tmp_path / "gpus"
    directory.mkdir(mode=0o700)
    (directory / "0.abc.json").write_text(json.dumps(facts))

    assert gpu_holders() == []
    assert list(directory.iterdir()) == []


def test_run_starts_without_a_reservation_if_its_directory_cannot_be_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("DRIVETRAIN_GPU_RESERVATIONS", str(tmp_path / "open"))
    DataParallelTrainer(
        report_gpus,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True, runtime=LocalRuntime(gpus=["0"])),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    ).fit()

    assert "run: other runs may use the same GPUs: [DT-415]" in capfd.readouterr().err
    assert gpu_holders() == []


def test_pickled_runtime_still_does_not_wait() -> None:
    assert pickle.loads(pickle.dumps(LocalRuntime(wait=False)))._wait is False


def test_runs_of_a_batch_job_do_not_consider_the_runs_of_other_jobs(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start("first", tmp_path)
    pipe.receive(2)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    second = start("second", tmp_path, runtime=LocalRuntime(gpus=["0", "1"], wait=False))

    assert gpus_of(pipe.receive(2), "second") == ["0", "1"]
    assert {holder.run for holder in gpu_holders()} == {"second"}
    first.finish()
    second.finish()


def test_reservations_can_be_switched_off(tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start("first", tmp_path)
    pipe.receive(2)
    monkeypatch.setenv("DRIVETRAIN_GPU_RESERVATIONS", "off")
    second = start("second", tmp_path)

    assert gpus_of(pipe.receive(2), "second") == ["0", "1"]
    assert gpu_holders() == []
    first.finish()
    second.finish()


NVML = """
from types import SimpleNamespace
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetHandleByIndex = lambda index: str(index)
def nvmlDeviceGetHandleByUUID(uuid):
    raise RuntimeError("not found")
def nvmlDeviceGetComputeRunningProcesses(gpu):
    return [SimpleNamespace(pid=PID), SimpleNamespace(pid=1 << 22)] if gpu in "01" else []
"""


def test_gpus_that_other_programs_use_are_taken_last(
    tmp_path: Path,
    pipe: Pipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / "pynvml.py").write_text(NVML.replace("PID", str(program.pid)))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        run = start("run", tmp_path, workers=3)

        assert gpus_of(pipe.receive(3), "run") == ["0", "2", "3"]
        expected = f"run: other programs use GPUs of this run. GPU 0: process {program.pid} of "
        assert expected in capfd.readouterr().err
        run.finish()
    finally:
        program.communicate(b"\n")
        sys.modules.pop("pynvml", None)


def test_commands_show_which_run_uses_which_gpu(tmp_path: Path, pipe: Pipe, capfd: pytest.CaptureFixture[str]) -> None:
    run = start("digits", tmp_path)
    pipe.receive(2)
    capfd.readouterr()

    assert main(["runs", "list", str(tmp_path / "runs")]) == 0
    assert f"GPUs of this machine:\n  GPU 0: run digits (process {os.getpid()}, since " in capfd.readouterr().out
    main(["doctor", "--storage-path", str(tmp_path / "runs")])
    assert f"GPU 1: run digits (process {os.getpid()}" in " ".join(capfd.readouterr().out.split())
    run.finish()


def test_train_function_in_the_own_process_reserves_the_first_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = []
    trainer = DataParallelTrainer(
        lambda: found.extend(gpu_holders()),
        scaling_config=ScalingConfig(num_workers=0, use_gpu=True),
        run_config=RunConfig(name="alone", storage_path=tmp_path / "runs", verbose=0),
    )
    trainer.fit()

    assert [(holder.gpu, holder.run) for holder in found] == [("2", "alone")]
    assert gpu_holders() == []
