import builtins
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

import drivetrain
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import in_this_process, once_on_ray, same_on_ray, with_parent, with_processes
from tests.support import Collector, Pipe, release, send_line, wait_for_release, wait_until_exited

FIT = """
import json, sys
import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

given = json.loads(sys.argv[1])

def fit(function, config=None, **options):
    return DataParallelTrainer(
        function,
        train_loop_config=config,
        **options,
        scaling_config=ScalingConfig(num_workers=given["num_workers"], runtime=given["runtime"]),
        run_config=RunConfig(name="run", storage_path=given["storage_path"], verbose=0, start_timeout_s=180),
    ).fit()
"""

WAIT = (
    FIT
    + """
import os, signal, subprocess
from tests.support import send_line, wait_for_release

def train(config):
    send_line(given["pipe"], os.getpid())
    if given["child"]:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        send_line(given["pipe"], child.pid)
    wait_for_release(given["gate"])

class WaitsInItsSetUp(drivetrain.plugin.Backend):
    def session(self, context, rendezvous):
        train({})

if __name__ == "__main__":
    fit(train)
    print("fit() returned")
"""
)


@dataclass(frozen=True, slots=True)
class Options:
    lr: float = 0.1
    names: tuple[str, ...] = ("a", "b")


@same_on_ray
def test_config_may_be_an_object_of_a_dataclass(runtime: RuntimeUnderTest) -> None:
    def train(options: Options) -> tuple[str, float, tuple[str, ...]]:
        return type(options).__qualname__, options.lr, options.names

    assert runtime.fit(train, Options(lr=0.5)).return_value == ("Options", 0.5, ("a", "b"))


def test_train_function_runs_on_the_main_thread_of_its_own_process(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        # Only the main thread may set a handler, and a non-default handler would belong to other code.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        drivetrain.report(
            {
                "main_thread": threading.current_thread() is threading.main_thread(),
                "interrupt_is_default": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                "print_of": builtins.print.__module__,
                "working_directory": os.getcwd(),
                "pid": os.getpid(),
            }
        )

    collector = Collector()
    runtime.fit(train, callbacks=[collector])

    facts = [collector.metrics_of(rank)[0] for rank in range(runtime.world())]
    for fact in facts:
        assert fact["main_thread"] is True
        # In this process the handler stays as it was: Ray, once connected, replaces Python's with its own.
        assert fact["print_of"] == ("builtins" if runtime.has_processes else builtins.print.__module__)
        assert fact["working_directory"] == os.getcwd()
    pids = {fact["pid"] for fact in facts}
    if runtime.has_processes:
        assert len(pids) == runtime.world()
        assert os.getpid() not in pids
        assert all(fact["interrupt_is_default"] for fact in facts)
    else:
        assert pids == {os.getpid()}


@in_this_process
def test_debugger_finds_the_train_function_on_the_callers_own_stack(runtime: RuntimeUnderTest) -> None:
    here, stdin = id(sys._getframe()), id(sys.stdin)

    def train() -> tuple[bool, bool, str, int]:
        frame, callers = sys._getframe(), []
        while frame is not None:
            callers.append(id(frame))
            frame = frame.f_back
        return here in callers, id(sys.stdin) == stdin, sys._getframe().f_code.co_filename, threading.get_ident()

    assert runtime.fit(train).return_value == (True, True, __file__, threading.get_ident())


@in_this_process
def test_exit_of_the_script_inside_the_train_function_exits_the_script(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        sys.exit("that is enough")

    with pytest.raises(SystemExit, match="that is enough"):
        runtime.fit(train)


def test_functions_of_a_script_and_lambdas_run(runtime: RuntimeUnderTest) -> None:
    source = (
        FIT
        + """
STEPS = 3

class Model:
    def __init__(self, size):
        self.size = size

def grow(model):
    return Model(model.size + 1)

def train(config):
    model = Model(config["size"])
    for step in range(STEPS):
        model = grow(model)
        drivetrain.report({"size": model.size})
    return model

if __name__ == "__main__":
    result = fit(train, {"size": 4})
    assert type(result.return_value) is Model, result.return_value
    print("model", result.return_value.size, result.metrics["size"])
    given["storage_path"] += "/lambda"
    print("lambda", fit(lambda config: config["x"] * 2, {"x": 21}).return_value)
"""
    )
    driver = runtime.start_driver(source)

    status, output, errors = driver.wait()

    assert status == 0, errors
    assert output.splitlines() == ["model 7 7", "lambda 42"]
    driver.wait_until_nothing_is_left()


@same_on_ray
def test_script_without_main_guard_runs(runtime: RuntimeUnderTest) -> None:
    driver = runtime.start_driver(FIT + "print(fit(lambda: 'ran once').return_value)\n")

    status, output, errors = driver.wait()

    assert status == 0, errors
    assert output == "ran once\n"


def test_ctrl_c_raises_keyboard_interrupt_and_leaves_no_process(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    driver = runtime.start_driver(WAIT, {"pipe": pipe.path, "gate": gate.path, "child": False})
    pids = pipe.receive_pids(runtime.world())

    driver.interrupt()

    status, output, errors = driver.wait()
    # Python exits by the signal; if Ray is loaded, its exit handlers change the exit code to 1.
    assert status == (-signal.SIGINT if runtime.supports("exit status") else 1), errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "fit() returned" not in output
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()


@same_on_ray
def test_driver_that_catches_ctrl_c_gets_its_handler_back_and_leaves_no_worker(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    source = WAIT.replace(
        "    fit(train)\n",
        "    before = signal.getsignal(signal.SIGINT)\n"
        "    try:\n        fit(train)\n    except KeyboardInterrupt:\n"
        "        print('caught', signal.getsignal(signal.SIGINT) is before, flush=True)\n"
        "        wait_for_release(given['gate'])\n",
    )
    driver = runtime.start_driver(source, {"pipe": pipe.path, "gate": gate.path, "child": False})
    pids = set(pipe.receive_pids(runtime.world())) - {driver.process.pid}

    driver.interrupt()

    assert driver.process.stdout is not None
    assert driver.process.stdout.readline() == "caught True\n"
    wait_until_exited(pids)
    gate.release()
    assert driver.wait()[0] == 0


@with_parent
def test_second_ctrl_c_while_the_workers_are_ending_leaves_no_child_of_a_worker(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    source = WAIT.replace(
        '    wait_for_release(given["gate"])\n',
        "    signal.signal(signal.SIGTERM, lambda *_: send_line(given['pipe'], 'terminated'))\n"
        "    send_line(given['pipe'], 'ready')\n"
        '    wait_for_release(given["gate"])\n',
    )
    driver = runtime.start_driver(source, {"pipe": pipe.path, "gate": gate.path, "child": True})
    lines = pipe.receive(6)
    pids = [int(line) for line in lines if line != "ready"]
    driver.interrupt()
    if runtime.name == "local":  # the other runtimes send no SIGTERM first
        pipe.receive(1)

    driver.interrupt()

    _, _, errors = driver.wait()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()


@pytest.mark.parametrize("end", ["returns", "raises", "is killed"])
@with_parent
def test_end_of_a_run_leaves_no_process_that_a_worker_has_started_in_its_own_session(
    runtime: RuntimeUnderTest, pipe: Pipe, end: str
) -> None:
    path = pipe.path
    wait = "import signal; signal.pause()"
    start_another = (
        "import subprocess, sys; from tests.support import send_line\n"
        f"child = subprocess.Popen([sys.executable, '-c', {wait!r}], start_new_session=True)\n"
        f"send_line({path!r}, child.pid)"
    )

    def train() -> None:
        for script in (wait, start_another):
            child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, env=environment)
            send_line(path, child.pid)
        assert child.wait() == 0
        if end == "raises":
            raise ValueError("no data")
        if end == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = runtime.trainer(train, workers=1).fit(raise_on_failure=False)

    assert (result.error is None) == (end == "returns")
    wait_until_exited(pipe.receive_pids(3))


@pytest.mark.parametrize("child", once_on_ray(True, False), ids=["workers with children", "workers"])
@with_processes
def test_kill_9_of_the_driver_leaves_no_process(runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe, child: bool) -> None:
    driver = runtime.start_driver(WAIT, {"pipe": pipe.path, "gate": gate.path, "child": child})
    pids = pipe.receive_pids(4 if child else 2)

    driver.kill()

    wait_until_exited([driver.process.pid, *pids])
    driver.wait_until_nothing_is_left()


@with_processes
def test_nothing_is_left_running_after_a_success(runtime: RuntimeUnderTest, pipe: Pipe) -> None:
    def train(config: dict) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        send_line(config["pipe"], os.getpid())
        send_line(config["pipe"], child.pid)
        child.returncode = 0  # it is left behind on purpose

    runtime.fit(train, {"pipe": pipe.path})

    wait_until_exited(pipe.receive_pids(4))


@with_processes
def test_worker_that_ignores_sigterm_is_killed(runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe) -> None:
    def train(config: dict) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        send_line(config["pipe"], os.getpid())
        if drivetrain.get_context().get_world_rank() == 0:
            wait_for_release(config["gate"])
            raise ValueError
        release(config["gate"])
        signal.pause()

    with pytest.raises(drivetrain.TrainingFailedError):
        runtime.fit(train, {"pipe": pipe.path, "gate": gate.path})

    wait_until_exited(pipe.receive_pids(2))


def test_second_run_of_the_same_driver_starts_in_a_clean_state(runtime: RuntimeUnderTest) -> None:
    def train() -> dict:
        leftovers = [name for name in ("leaked",) if hasattr(builtins, name)]
        if drivetrain.get_context().get_world_size() > 1:
            builtins.leaked = True
        return {"leftovers": leftovers, "checkpoint": drivetrain.get_checkpoint()}

    first = runtime.fit(train, name="first")
    second = runtime.fit(train, name="second")

    assert first.return_value == second.return_value == {"leftovers": [], "checkpoint": None}
    assert Path(first.path) != Path(second.path)


@with_processes
def test_ctrl_c_while_the_workers_are_still_starting_leaves_no_process(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    source = WAIT.replace("fit(train)", "fit(lambda: None, backend_config=WaitsInItsSetUp())")
    driver = runtime.start_driver(source, {"pipe": pipe.path, "gate": gate.path, "child": False})
    pids = pipe.receive_pids(2)

    driver.interrupt()

    _, output, errors = driver.wait()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "fit() returned" not in output
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()


@with_processes
@same_on_ray
def test_ctrl_c_ends_the_run_if_the_kernel_delivers_it_to_another_thread(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    # The signal then does not interrupt the wait of the main thread. The same happens by chance if the signal reaches
    # the main thread just before the wait begins.
    source = WAIT.replace(
        "    fit(train)\n",
        "    import threading\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "    fit(train)\n",
    )
    driver = runtime.start_driver(source, {"pipe": pipe.path, "gate": gate.path, "child": False})
    pids = pipe.receive_pids(2)
    driver.wait_until_it_waits_for_events()

    driver.interrupt()

    _, output, errors = driver.wait()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "fit() returned" not in output
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()
