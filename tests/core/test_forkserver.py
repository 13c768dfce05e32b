"""The fork server of local workers: its preloaded modules, its replacement, and cases without preloading."""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain._hooks.backend import NoBackend
from drivetrain.plugin import Backend
from tests.support import open_pipe, send_line, wait_until_exited


class Preloads(NoBackend):
    def __init__(self, *modules: str) -> None:
        self.preload = modules


def fit(function, tmp_path: Path, backend: Backend | None = None, num_workers: int = 1, **options):
    return DataParallelTrainer(
        function,
        backend_config=backend or NoBackend(),
        scaling_config=ScalingConfig(num_workers=num_workers, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, start_timeout_s=30, **options),
    ).fit()


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


def server_and_modules():
    return os.getppid(), sorted(name for name in sys.modules if name.startswith("preloaded_"))


def test_preloaded_module_is_imported_before_the_train_function_runs(tmp_path, write_module):
    write_module("preloaded_quiet", "")
    _, modules = fit(server_and_modules, tmp_path, Preloads("preloaded_quiet")).return_value
    assert modules == ["preloaded_quiet"]


def test_modules_that_a_run_names_are_preloaded_after_those_of_its_backend(tmp_path, write_module):
    write_module("preloaded_of_backend", "")
    write_module("preloaded_of_run", "import sys; assert 'preloaded_of_backend' in sys.modules")
    backend = Preloads("preloaded_of_backend")
    _, modules = fit(server_and_modules, tmp_path, backend, preload=["preloaded_of_run"]).return_value
    assert modules == ["preloaded_of_backend", "preloaded_of_run"]


def test_next_run_of_the_same_driver_uses_the_same_server(tmp_path):
    first, _ = fit(server_and_modules, tmp_path).return_value
    second, _ = fit(server_and_modules, tmp_path).return_value
    assert first == second


def test_changed_environment_variable_starts_a_new_server(tmp_path, write_module, monkeypatch):
    write_module("preloaded_quiet", "")
    backend = Preloads("preloaded_quiet")
    backend.preload_environment = ("READ_ON_IMPORT",)
    first, _ = fit(server_and_modules, tmp_path, backend).return_value
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    second, _ = fit(server_and_modules, tmp_path, backend).return_value
    assert second == first
    monkeypatch.setenv("READ_ON_IMPORT", "1")
    third, _ = fit(server_and_modules, tmp_path, backend).return_value
    assert third != first
    wait_until_exited([first])


def test_module_that_starts_a_thread_is_not_preloaded(tmp_path, write_module):
    write_module(
        "preloaded_threaded",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    write_module("preloaded_before", "")
    write_module("preloaded_after", "")
    backend = Preloads("preloaded_before", "preloaded_threaded", "preloaded_after")
    _, modules = fit(server_and_modules, tmp_path, backend).return_value
    assert modules == ["preloaded_after", "preloaded_before"], "a fork would lose the thread and keep its locks held"


def test_module_that_cannot_be_preloaded_does_not_fail_the_run(tmp_path, write_module):
    write_module("preloaded_broken", "raise ImportError('no such library')")
    assert fit(server_and_modules, tmp_path, Preloads("preloaded_broken")).return_value


def kill_the_server():
    os.kill(os.getppid(), 9)
    while True:
        os.sched_yield()


def test_death_of_the_server_leaves_no_child_of_a_worker(tmp_path):
    with open_pipe(tmp_path / "pids") as pipe:
        path = pipe.path

        def train():
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            send_line(path, child.pid)
            kill_the_server()

        with pytest.raises(TrainingFailedError, match="was killed because the fork server exited"):
            fit(train, tmp_path)
        wait_until_exited(pipe.receive_pids(1))


def test_death_of_the_server_fails_the_run_and_the_next_run_starts_another(tmp_path):
    with pytest.raises(TrainingFailedError, match="was killed because the fork server exited"):
        fit(kill_the_server, tmp_path)
    assert fit(server_and_modules, tmp_path).return_value


def test_rank_whose_exit_code_arrives_late_is_the_root_cause(tmp_path, monkeypatch):
    """The server has reaped the process, but is too busy to send the exit code before a peer reports its error."""
    monkeypatch.setattr("drivetrain._runtimes.local._exit_code_of_zombie", lambda pid: None)
    monkeypatch.setattr("drivetrain._runtimes.local._DEATH_WAIT_S", 60.0)

    victim, server = tmp_path / "victim", tmp_path / "server"
    os.mkfifo(victim)
    os.mkfifo(server)

    def train():
        if drivetrain.get_context().get_world_rank() == 1:
            victim.write_text(str(os.getpid()))
            threading.Event().wait(30)
        pid = int(victim.read_text())
        exited = os.pidfd_open(pid)
        os.kill(os.getppid(), signal.SIGSTOP)
        server.write_text(str(os.getppid()))
        os.kill(pid, signal.SIGKILL)
        select.select([exited], [], [], 30)
        raise ConnectionError("closed by peer")

    def delay_the_server():
        pid = int(server.read_text())
        threading.Event().wait(0.3)
        os.kill(pid, signal.SIGCONT)

    threading.Thread(target=delay_the_server, daemon=True).start()
    with pytest.raises(TrainingFailedError) as caught:
        fit(train, tmp_path, num_workers=2)
    assert caught.value.rank == 1


class Warms(NoBackend):
    def __init__(self, *modules: str) -> None:
        self.warmup = modules


def test_warmup_modules_are_imported_before_the_first_group(tmp_path, write_module):
    write_module("preloaded_first", "")
    write_module("preloaded_second", "import sys; assert 'preloaded_first' in sys.modules")
    backend = Warms("preloaded_second")
    backend.preload = ("preloaded_first",)
    first, modules = fit(server_and_modules, tmp_path, backend).return_value
    assert modules == ["preloaded_first", "preloaded_second"]
    assert fit(server_and_modules, tmp_path, backend).return_value == (first, modules)


def test_idle_server_that_was_killed_is_replaced(tmp_path):
    first, _ = fit(server_and_modules, tmp_path).return_value
    os.kill(first, signal.SIGKILL)
    wait_until_exited([first])
    second, _ = fit(server_and_modules, tmp_path).return_value
    assert second != first


def test_killing_the_driver_ends_the_server_and_the_workers_forked_from_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED_DRIVER)
    os.mkfifo(tmp_path / "processes")
    driver = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    processes = [int(pid) for pid in (tmp_path / "processes").read_text().split()]
    driver.kill()
    driver.wait()
    assert len(processes) == 3
    wait_until_exited(processes)


KILLED_DRIVER = """
import os, subprocess, time
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def train():
    child = subprocess.Popen(["sleep", "100"])
    with open("processes", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {os.getppid()}")
    time.sleep(100)


DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=1, runtime="local"),
    run_config=RunConfig(storage_path=os.getcwd(), verbose=0),
).fit()
"""


def test_512_workers_start_report_and_exit(tmp_path):
    def train():  # defined here so that the workers need not import this module
        drivetrain.report(rank=drivetrain.get_context().get_world_rank(), reduce={"rank": "sum"})

    trainer = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=512, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, start_timeout_s=300, worker_output="none"),
    )
    assert trainer.fit().metrics["rank"] == sum(range(512))


def test_server_that_does_not_respond_ends_the_run_at_the_start_timeout(tmp_path):
    server, _ = fit(server_and_modules, tmp_path).return_value
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(TrainingFailedError, match="start_timeout_s"):
        DataParallelTrainer(
            server_and_modules,
            backend_config=NoBackend(),
            scaling_config=ScalingConfig(num_workers=200, runtime="local"),
            run_config=RunConfig(storage_path=tmp_path, verbose=0, start_timeout_s=1),
        ).fit()
    wait_until_exited([server])
