"""The runtime ``command``: templates, commands that fail in every way, and what is left when something is killed.

The launchers are small shell scripts. ``tests/launch`` uses real ones, and ``tests/contract`` runs on this runtime.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import drivetrain
from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    ResourceError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerDiedError,
)
from drivetrain._runtimes.processes import fork_process
from drivetrain.plugin import BackendConfig, WorkerInfo
from drivetrain_console import main
from drivetrain_launch import CommandRuntime, _guard
from drivetrain_launch._address import own_address
from drivetrain_launch._shares import Share, VisibleDevices, divide
from drivetrain_launch._template import Template
from tests.support import (
    DEADLINE_S,
    PROCESS_LIMIT_S,
    Collector,
    Driver,
    Pipe,
    open_pipe,
    send_line,
    wait_for_release,
    wait_until_exited,
)

WORKER = ["/usr/bin/python 3", "-m", "worker"]
QUOTED = ["'/usr/bin/python 3'", "-m", "worker"]
TWO = ScalingConfig(num_workers=2)

# Like ssh, it joins its arguments, has them parsed by a shell, and passes no environment. It notes the hosts.
REMOTE_SHELL = """\
echo "$1" >> {directory}/hosts
shift
exec env -i PATH="$PATH" HOME="$HOME" sh -c "cd / && exec $*"
"""

DRIVER = """
import json, os, signal, sys
from drivetrain import Callback, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_launch import CommandRuntime
from tests.support import send_line

given = json.loads(sys.argv[1])

def train():
    send_line(given["pipe"], os.getpid())
    signal.pause()

class ForkChild(Callback):
    def on_group_start(self, run, attempt, workers):
        if given["forks"] and os.fork() == 0:
            send_line(given["pipe"], os.getpid())
            signal.pause()

DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(
        num_workers=2, runtime=CommandRuntime(given["command"], token_directory=given["directory"])
    ),
    run_config=RunConfig(
        name="run", storage_path=given["directory"], verbose=0, start_timeout_s=180, callbacks=[ForkChild()]
    ),
).fit()
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """Receives messages of other processes."""
    with open_pipe(tmp_path / "pipe") as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a script whose arguments are the number of workers and the command of a worker, and return a template."""

    def write(text: str, fields: str = "{n} {worker}") -> str:
        file = tmp_path / "launcher.sh"
        file.write_text(text.replace("{directory}", str(tmp_path)))
        return f"bash {file} {fields}"

    return write


@pytest.fixture
def start_driver(tmp_path: Path, pipe: Pipe) -> Iterator[Callable[..., Driver]]:
    """Start a driver whose train function waits, with a template."""
    drivers: list[Driver] = []

    def start(command: str, *, forks: bool = False) -> Driver:
        given = {"command": command, "directory": str(tmp_path), "pipe": pipe.path, "forks": forks}
        drivers.append(Driver(tmp_path, DRIVER, given, {}))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.clean_up()


def fit(
    function: Callable[..., Any],
    directory: Path,
    runtime: CommandRuntime | str,
    *,
    scaling: ScalingConfig = TWO,
    backend_config: Any = None,
    **options: Any,
) -> Result:
    return DataParallelTrainer(
        function,
        train_loop_config={"directory": str(directory)},
        backend_config=backend_config or BackendConfig(),
        scaling_config=replace(scaling, runtime=CommandRuntime(runtime) if isinstance(runtime, str) else runtime),
        run_config=RunConfig(
            name="run", storage_path=directory, verbose=0, **{"start_timeout_s": 60, "log_to_file": True, **options}
        ),
    ).fit()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def do_nothing(config: dict[str, Any]) -> None:
    pass


# Templates


@pytest.mark.parametrize(
    ("template", "command"),
    [
        ("srun -n {n} {worker}", ["srun", "-n", "2", *WORKER]),
        ("ssh {host} {worker}", ["ssh", "node1", *QUOTED]),
        ("timeout 9 /usr/bin/ssh -T {host} {worker}", ["timeout", "9", "/usr/bin/ssh", "-T", "node1", *QUOTED]),
        ("ssh user@{host} 'cd /x && {worker}'", ["ssh", "user@node1", "cd /x && '/usr/bin/python 3' -m worker"]),
        ("pdsh -w node[1-{n}] {worker}", ["pdsh", "-w", "node[1-2]", *QUOTED]),
        ("""run --json '{{"n": {n}}}' {worker}""", ["run", "--json", '{"n": 2}', *WORKER]),
        ("{worker}", WORKER),
        ("bash -c 'exec {worker} 2>&1'", ["bash", "-c", "exec '/usr/bin/python 3' -m worker 2>&1"]),
        ("strace -c {worker}", ["strace", "-c", *WORKER]),
        ("echo $HOME; {worker}", ["echo", "$HOME;", *WORKER]),
    ],
)
def test_template_becomes_a_command_line_without_a_shell(template: str, command: list[str]) -> None:
    assert Template.parse(template).fill(num_workers=2, worker=WORKER, host="node1") == command


def test_unknown_program_with_hosts_gets_no_word_that_a_shell_would_change() -> None:
    template = Template.parse("my-shell {host} {worker}")

    assert template.fill(num_workers=2, worker=["/bin/python", "-m", "x"], host="a")[2:] == ["/bin/python", "-m", "x"]
    with pytest.raises(ConfigurationError, match=r"got '/usr/bin/python 3'.*\{worker\} inside of quotes"):
        template.fill(num_workers=2, worker=WORKER, host="a")


HOSTILE = "a b;touch owned;$(touch owned)'`touch owned`"
OVER_SSH = """
import sys
from pathlib import Path
from drivetrain_launch import CommandRuntime
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

assert "touch owned" in sys.executable
directory = Path(sys.argv[1])
runtime = CommandRuntime("ssh {host} {worker}", hosts=["node1"], token_directory=directory)
print(DataParallelTrainer(
    lambda: sys.executable,
    scaling_config=ScalingConfig(num_workers=1, runtime=runtime),
    run_config=RunConfig(storage_path=directory, verbose=0, start_timeout_s=60),
).fit().return_value)
"""


def test_paths_are_not_changed_or_executed_by_the_shell_of_a_remote_node(tmp_path: Path) -> None:
    # Like ssh and sshd together: the arguments are joined with spaces, and parsed by a shell.
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nshift\nexec env -i PATH="$PATH" HOME="$HOME" sh -c "$*"\n')
    ssh.chmod(0o755)
    hostile = tmp_path / HOSTILE
    (hostile / "runs").mkdir(parents=True)
    (hostile / "environment").symlink_to(sys.prefix)
    python = str(hostile / "environment" / "bin" / "python")
    done = subprocess.run(
        [python, "-c", OVER_SSH, str(hostile / "runs")],
        env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )

    assert done.stdout.strip() == python, done.stderr
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"template": "srun -n {n}"}, r"expected the field \{worker\}"),
        ({"template": "srun -n {size} {worker}"}, r"got \{size\}"),
        ({"template": "srun -n {} {worker}"}, r"got \{\}"),
        ({"template": "srun -n {n:3} {worker}"}, r"got \{n:3\}"),
        ({"template": "srun -n {n.real} {worker}"}, r"got \{n.real\}"),
        ({"template": "srun {worker"}, "braces"),
        ({"template": "sh -c '{worker}"}, "No closing quotation"),
        ({"template": ""}, r"expected the field \{worker\}"),
        ({"template": 3}, "got 3"),
        ({"template": "{worker} {n}"}, r"expected \{worker\} as the last word, got '\{n\}' after it"),
        ({"template": "{worker} --foo"}, "got '--foo' after it"),
        ({"template": "nohup {worker} &"}, "got '&' after it"),
        ({"template": "bash -c '{worker}'"}, r"expected 'exec \{worker\}' after bash -c, got '\{worker\}'"),
        ({"template": "ssh {host} /bin/sh -lc {worker}", "hosts": ["a"]}, "after /bin/sh -lc"),
        ({"template": "srun -w {host} -n {n} {worker}", "hosts": ["a"]}, "got both"),
        ({"template": "ssh {host} {worker}"}, "expected hosts"),
        ({"template": "ssh {host} {worker}", "hosts": []}, "expected hosts"),
        ({"template": "ssh {host} {worker}", "hosts": "node1"}, "a list of host names"),
        ({"template": "ssh {host} {worker}", "hosts": ["-oProxyCommand=x"]}, "got '-oProxyCommand=x'"),
        ({"template": "ssh {host} {worker}", "hosts": ["a b"]}, "got 'a b'"),
        ({"template": "ssh {host} {worker}", "hosts": ["a;b"]}, "got 'a;b'"),
        ({"template": "srun -n {n} {worker}", "hosts": ["a"]}, r"expected the field \{host\}"),
    ],
)
def test_invalid_template_is_refused_when_the_runtime_is_created(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as raised:
        CommandRuntime(**options)
    assert raised.value.code == "DT-113"


def test_template_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = ScalingConfig(num_workers=2, runtime="command")
    trainer = DataParallelTrainer(
        lambda: drivetrain.get_context().get_world_size(),
        scaling_config=scaling,
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    )
    monkeypatch.delenv("DRIVETRAIN_COMMAND", raising=False)
    with pytest.raises(ConfigurationError, match="Set the environment variable DRIVETRAIN_COMMAND"):
        trainer.fit()

    monkeypatch.setenv("DRIVETRAIN_COMMAND", "{worker}")

    assert trainer.fit().return_value == 2


def test_hosts_and_the_directory_of_the_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_COMMAND", "ssh {host} {worker}")
    monkeypatch.setenv("DRIVETRAIN_HOSTS", "node1, user@node2,")
    monkeypatch.setenv("DRIVETRAIN_TOKEN_DIRECTORY", "/shared")

    runtime = CommandRuntime()

    assert runtime == CommandRuntime(
        "ssh {host} {worker}", hosts=("node1", "user@node2"), token_directory=Path("/shared")
    )
    assert pickle.loads(pickle.dumps(runtime)) == runtime


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_workers": (1, 2)}, r"a command cannot find free resources.* Pass one number, or use another runtime"),
        ({"num_workers": 0}, "at least 1"),
        ({"spare_workers": 1}, "expected 0"),
        ({"trainer_resources": {"CPU": 1}}, "the command selects resources"),
        ({"accelerator_type": "A100"}, "the command selects resources"),
        ({"placement_strategy": "SPREAD"}, "the command selects nodes"),
        ({"resources_per_worker": {"memory": 1}}, "only CPU and GPU"),
    ],
)
def test_unsupported_configuration_is_refused_before_the_run_starts(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as raised:
        fit(do_nothing, tmp_path, "{worker}", scaling=ScalingConfig(**options))
    assert raised.value.code == "DT-114"
    assert not (tmp_path / "run").exists()


def test_program_that_is_not_installed_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'no-such-program', which is not on PATH"):
        fit(do_nothing, tmp_path, "no-such-program -n {n} {worker}")
    assert not (tmp_path / "run").exists()


def test_program_that_cannot_be_executed_is_explained(tmp_path: Path) -> None:
    program = tmp_path / "launcher"
    program.write_text("#!/no/such/interpreter")
    program.chmod(0o755)
    with pytest.raises(TrainingFailedError, match=rf"{program}.*not found"):
        fit(do_nothing, tmp_path, f"{program} {{worker}}")


# What workers get


def test_workers_are_started_on_the_hosts_in_turn_without_the_environment(
    tmp_path: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    remote_shell = script(REMOTE_SHELL, "{host} {worker}")
    shared = tmp_path / "shared"
    shared.mkdir()
    runtime = CommandRuntime(remote_shell, hosts=["localhost", "user@localhost"], token_directory=shared)

    def train(config: dict[str, Any]) -> tuple[str, bool, str | None]:
        drivetrain.report({"directory": os.getcwd()})
        return os.getcwd(), "tests.support" in sys.modules, os.environ.get("PWD_OF_THE_DRIVER")

    monkeypatch.setenv("PWD_OF_THE_DRIVER", str(tmp_path))
    result = fit(train, tmp_path, runtime, scaling=ScalingConfig(num_workers=3))

    assert result.return_value == (str(tmp_path), False, None)
    hosts = (tmp_path / "hosts").read_text().split()
    assert sorted(hosts) == ["localhost", "localhost", "user@localhost"]
    assert not list(shared.iterdir())


def test_environment_that_is_not_passed_on_is_explained(tmp_path: Path, script: Callable[..., str]) -> None:
    with pytest.raises(TrainingFailedError, match=r"\[DT-311\] .* set token_directory") as raised:
        fit(do_nothing, tmp_path, script(REMOTE_SHELL, "host {worker}"))
    assert raised.value.code == "DT-310"


def test_backend_variables_and_threads_are_set_before_the_framework_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 3})

    def train(config: dict[str, Any]) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    assert fit(train, tmp_path, "{worker}", scaling=scaling).return_value == "3"


def test_workers_that_see_the_same_gpus_get_different_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")

    def train(config: dict[str, Any]) -> None:
        context = drivetrain.get_context()
        text = f"{os.environ['CUDA_VISIBLE_DEVICES']} {context.worker.accelerator_ids}"
        Path(config["directory"], f"gpus_{context.get_world_rank()}").write_text(text)

    fit(train, tmp_path, "{worker}", scaling=ScalingConfig(num_workers=2, use_gpu=True))

    assert [(tmp_path / f"gpus_{rank}").read_text() for rank in range(2)] == ["4 ('4',)", "7 ('7',)"]


def test_too_few_gpus_are_an_error_that_names_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ResourceError, match=r"2 workers with 1 GPUs each require 2 GPUs on node .* 0 \(none\)"):
        fit(do_nothing, tmp_path, "{worker}", scaling=ScalingConfig(num_workers=2, use_gpu=True))


def visible(gpus: str, cpus: int = 4, node: str = "a") -> VisibleDevices:
    return VisibleDevices(node, tuple(gpus.split()), tuple(range(cpus)))


@pytest.mark.parametrize(
    ("gpus_per_worker", "seen", "shares"),
    [
        (0, [visible("0 1"), visible("0 1")], [(), ()]),
        (1, [visible("0 1"), visible("0 1")], [("0",), ("1",)]),
        (1, [visible("0", node="a"), visible("0", node="b")], [("0",), ("0",)]),
        (1, [visible("2"), visible("3")], [("2",), ("3",)]),
        (2, [visible("0 1 2 3"), visible("0 1 2 3")], [("0", "1"), ("2", "3")]),
        (0.5, [visible("0 1"), visible("0 1"), visible("0 1")], [("0",), ("0",), ("1",)]),
        (0.5, [visible("0"), visible("0")], [("0",), ("0",)]),
    ],
)
def test_gpus_are_divided_among_workers_that_see_the_same_ones(
    gpus_per_worker: float, seen: list[VisibleDevices], shares: list[tuple[str, ...]]
) -> None:
    scaling = ScalingConfig(use_gpu=gpus_per_worker > 0, resources_per_worker={"GPU": gpus_per_worker or 0})
    for may_be_confined in (False, True):
        divided = divide(scaling, dict(enumerate(seen)), may_be_confined=may_be_confined)
        assert [share.gpus for share in divided.values()] == shares


def test_workers_of_one_command_that_see_a_single_gpu_have_gpus_of_their_own() -> None:
    scaling = ScalingConfig(use_gpu=True)
    seen = {0: visible("0"), 1: visible("0")}  # Slurm can give each task a GPU of its own, with the id 0
    assert [share.gpus for share in divide(scaling, seen, may_be_confined=True).values()] == [("0",), ("0",)]
    with pytest.raises(ResourceError, match=r"2 workers .* require 2 GPUs on node 'a', where they can use 1"):
        divide(scaling, seen, may_be_confined=False)


@pytest.mark.parametrize(
    ("command", "hosts"), [("{worker}", None), ("sh -c 'exec \"$@\"' {host} {worker}", ["localhost"])]
)
def test_workers_of_several_commands_do_not_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, hosts: list[str] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ResourceError, match=r"\[DT-301\] 2 workers with 1 GPUs each require 2 GPUs") as raised:
        fit(
            do_nothing,
            tmp_path,
            CommandRuntime(command, hosts=hosts),
            scaling=ScalingConfig(num_workers=2, use_gpu=True),
        )
    assert raised.value.code == "DT-301"


def test_threads_are_an_equal_part_of_the_cpus_that_workers_share() -> None:
    seen = {0: visible("", 8), 1: visible("", 8), 2: visible("", 8, "b"), 3: visible("", 3)}
    assert [share.threads for share in divide(ScalingConfig(), seen, may_be_confined=True).values()] == [4, 4, 8, 3]
    fixed = ScalingConfig(resources_per_worker={"CPU": 2})
    assert divide(fixed, seen, may_be_confined=True)[0] == Share((), 2)


# Addresses


def test_driver_listens_on_an_address_that_other_nodes_can_reach() -> None:
    assert not own_address(()).startswith("127.")
    assert not own_address(("localhost", "203.0.113.7")).startswith("127.")


def test_driver_listens_on_the_loopback_address_if_all_hosts_are_this_machine() -> None:
    assert own_address(("localhost", "user@127.0.0.1")) == "127.0.0.1"


def test_workers_connect_to_the_given_address(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> str:
        return drivetrain.get_context().worker.ip

    assert fit(train, tmp_path, CommandRuntime("{worker}", host="127.0.0.1")).return_value == "127.0.0.1"


def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"host: expected .*, got '203\.0\.113\.7'"):
        fit(do_nothing, tmp_path, CommandRuntime("{worker}", host="203.0.113.7"))


# Commands that fail


def test_command_that_exits_early_is_explained_with_its_last_output(
    tmp_path: Path, script: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    command = script("echo contacting the scheduler; echo 'error: invalid partition' >&2; exit 3")
    with pytest.raises(TrainingFailedError) as raised:
        fit(do_nothing, tmp_path, command)

    assert raised.value.code == "DT-310"
    assert "exited with code 3" in str(raised.value)
    assert "contacting the scheduler | error: invalid partition" in str(raised.value)
    assert raised.value.kind is FailureKind.INFRASTRUCTURE
    assert "error: invalid partition" in capfd.readouterr().err


def test_command_that_succeeds_without_starting_workers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match="exited with code 0; it printed nothing"):
        fit(do_nothing, tmp_path, "true {worker}")


def test_command_that_never_starts_its_workers_ends_at_the_deadline(tmp_path: Path, pipe: Pipe) -> None:
    command = f"sh -c 'echo $$ > {pipe.path}; echo waiting for nodes; exec sleep 1000' {{n}} {{worker}}"
    with pytest.raises(TrainingFailedError, match="is running; its output ended with: waiting for nodes") as raised:
        fit(do_nothing, tmp_path, command, start_timeout_s=5)

    assert raised.value.code == "DT-303"
    wait_until_exited(pipe.receive_pids(1))


class InvalidEnvironment(drivetrain.plugin.Backend):
    """Makes a worker fail before it connects to the driver."""

    environment: ClassVar = {"NOT=VALID": "1"}

    def session(self, context: Any, rendezvous: Any) -> Any:
        raise NotImplementedError


def test_worker_that_exits_before_it_connects_is_explained_with_its_traceback(tmp_path: Path) -> None:
    message = r"\[DT-310\] worker [01] exited with code 1 during its start; .* ValueError: illegal environment variable"
    with pytest.raises(TrainingFailedError, match=message):
        fit(do_nothing, tmp_path, "{worker}", backend_config=InvalidEnvironment())


def test_surplus_workers_are_reported_and_not_used(
    tmp_path: Path, script: Callable[..., str], pipe: Pipe, capfd: pytest.CaptureFixture[str]
) -> None:
    command = script(f'shift; "$@" & "$@" & "$@" & wait -n; echo . > {pipe.path}; wait')

    def train(config: dict[str, Any]) -> int:
        if drivetrain.get_context().get_world_rank() == 0:
            wait_for_release(config["directory"] + "/pipe")
        return drivetrain.get_context().get_world_size()

    assert fit(train, tmp_path, command).return_value == 2
    assert "has started more than 2 workers" in capfd.readouterr().err


# Losses


def kill_once(config: dict[str, Any]) -> int:
    context = drivetrain.get_context()
    if context.attempt == 0:
        if context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    return context.attempt


def test_next_attempt_uses_the_same_command(tmp_path: Path, script: Callable[..., str]) -> None:
    command = script('echo started >> {directory}/starts; shift; "$@" & "$@" & wait')
    collector = Collector()
    options = {"failure_config": FailureConfig(max_failures=1), "callbacks": [collector]}

    assert fit(kill_once, tmp_path, command, **options).return_value == 1

    assert (tmp_path / "starts").read_text() == "started\n"
    (failure,) = collector.failures
    assert "was killed by SIGKILL" in failure.summary
    assert failure.exception.exit_code == -signal.SIGKILL


def kill_own_supervisor(config: dict[str, Any]) -> None:
    context = drivetrain.get_context()
    if context.attempt == 0:
        if context.get_world_rank() == 1:
            send_line(config["directory"] + "/pipe", os.getpid())
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()


def test_loss_of_a_supervisor_ends_its_worker_and_starts_a_new_command(tmp_path: Path, pipe: Pipe) -> None:
    collector = Collector()
    options = {"failure_config": FailureConfig(max_failures=1), "callbacks": [collector]}

    fit(kill_own_supervisor, tmp_path, "{worker}", **options)

    (failure,) = collector.failures
    assert failure.rank == 1
    assert "was lost: the command `{worker}` was killed by SIGKILL" in failure.summary
    assert isinstance(failure.exception, WorkerDiedError)
    wait_until_exited(pipe.receive_pids(1))


class EndSupervisors(drivetrain.Callback):
    """Kills the supervisors between two attempts."""

    def on_group_start(self, run: Any, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self.supervisors = [parent(worker.pid) for worker in workers]

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        for pid in self.supervisors:
            os.kill(pid, signal.SIGKILL)
        wait_until_exited(self.supervisors)


def fail_once(config: dict[str, Any]) -> int:
    attempt = drivetrain.get_context().attempt
    if attempt == 0:
        raise ValueError("the first attempt")
    return attempt


def test_command_that_ends_between_two_attempts_costs_no_attempt(tmp_path: Path) -> None:
    collector = Collector()
    options = {"failure_config": FailureConfig(max_failures=1), "callbacks": [EndSupervisors(), collector]}

    assert fit(fail_once, tmp_path, "{worker}", **options).return_value == 1

    (failure,) = collector.failures
    assert "the first attempt" in failure.summary


def end_the_supervisor(config: dict[str, Any]) -> str:
    context = drivetrain.get_context()
    drivetrain.report({})
    if context.attempt == 0 and context.get_world_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    for _ in range(10_000_000) if context.attempt == 0 else ():
        if (info := drivetrain.get_preemption_info()) is not None:
            drivetrain.report({"notice": info.reason})
            drivetrain.resume_later()
            return "saved"
    return f"attempt {context.attempt}"


def test_sigterm_to_a_supervisor_is_a_preemption_and_starts_a_new_command(
    tmp_path: Path, script: Callable[..., str]
) -> None:
    command = script('echo started >> {directory}/starts; shift; "$@" & "$@" & wait')

    assert fit(end_the_supervisor, tmp_path, command).return_value == "attempt 1"
    assert (tmp_path / "starts").read_text() == "started\nstarted\n"


def test_workers_continue_if_the_command_is_killed(tmp_path: Path, script: Callable[..., str], pipe: Pipe) -> None:
    def train(config: dict[str, Any]) -> int:
        launcher = int(Path(config["directory"], "launcher.pid").read_text())
        if drivetrain.get_context().get_world_rank() == 0:
            os.kill(launcher, signal.SIGKILL)
            wait_until_exited([launcher])
        send_line(config["directory"] + "/pipe", os.getppid())
        drivetrain.report({"launcher": launcher}, reduce={"launcher": "max"})
        return launcher

    command = script('echo $$ > {directory}/launcher.pid; shift; "$@" & "$@" & wait')
    result = fit(train, tmp_path, command)

    assert result.metrics["launcher"] == result.return_value
    wait_until_exited(pipe.receive_pids(2))


@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_end_of_the_driver_ends_a_command_that_has_not_started_workers(
    tmp_path: Path, start_driver: Callable[..., Driver], script: Callable[..., str], pipe: Pipe, end: str
) -> None:
    driver = start_driver(script(f"trap '' HUP; echo $$ > {pipe.path}; sleep 1000 & wait"))
    pids = pipe.receive_pids(1)
    assert list(tmp_path.glob(".drivetrain-token-*"))

    getattr(driver, end)()

    driver.wait()
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()
    assert not list(tmp_path.glob(".drivetrain-token-*"))


@pytest.mark.parametrize("end", ["interrupt", "kill", "terminate"])
def test_end_of_the_driver_ends_workers_of_a_remote_command(
    start_driver: Callable[..., Driver], script: Callable[..., str], pipe: Pipe, end: str
) -> None:
    # Like a remote daemon, this shell starts the workers in sessions of their own.
    driver = start_driver(script('shift; setsid -f "$@"; setsid -f "$@"; sleep 1000'))
    pids = pipe.receive_pids(2)

    (driver.process.terminate if end == "terminate" else getattr(driver, end))()

    driver.wait()
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()


def test_end_of_the_driver_ends_workers_although_its_forked_child_continues(
    start_driver: Callable[..., Driver], script: Callable[..., str], pipe: Pipe
) -> None:
    # The guard cannot reach workers in sessions of their own. They notice the exit of the driver themselves.
    driver = start_driver(script('shift; setsid -f "$@"; setsid -f "$@"; sleep 1000'), forks=True)
    pids = pipe.receive_pids(3)
    (child,) = [pid for pid in pids if parent(pid) == driver.process.pid]

    driver.kill()

    wait_until_exited(set(pids) - {child})
    assert Path(f"/proc/{child}").exists()
    os.kill(child, signal.SIGKILL)
    driver.wait()
    driver.wait_until_nothing_is_left()


class ForkChild(drivetrain.Callback):
    """Forks a process that outlives the run."""

    child = 0

    def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
        self.child = fork_process()
        if self.child == 0:
            signal.pause()


def test_run_ends_although_a_forked_child_of_the_driver_continues(tmp_path: Path) -> None:
    callback = ForkChild()
    try:
        fit(do_nothing, tmp_path, "{worker}", callbacks=[callback])
        assert os.waitpid(callback.child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(callback.child, signal.SIGKILL)
        os.waitpid(callback.child, 0)


def test_guard_ends_although_another_process_keeps_its_pipe_open() -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", _guard.__file__, str(os.getpid())], stdin=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        process.stdin.write(_guard.END.encode())
        assert process.wait(DEADLINE_S) == 0


# The command line


@pytest.mark.parametrize(
    ("command", "status", "found"),
    [
        ("sh -c 'exec {worker}'", "ok", "uses /"),
        ("{worker}", "ok", "uses the workers' own interpreter"),
        ("no-such-program {worker}", "problem", "'no-such-program', which is not on PATH"),
        ("ssh {host} {worker}", "problem", "expected hosts"),
        ("srun", "problem", "expected the field {worker}"),
    ],
)
def test_doctor_checks_the_template(monkeypatch: pytest.MonkeyPatch, command: str, status: str, found: str) -> None:
    monkeypatch.delenv("DRIVETRAIN_HOSTS", raising=False)
    monkeypatch.setenv("DRIVETRAIN_COMMAND", command)

    (finding,) = CommandRuntime.diagnose(None)

    assert finding.status == status
    assert found in finding.found


def test_doctor_checks_nothing_without_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRIVETRAIN_COMMAND", raising=False)
    assert list(CommandRuntime.diagnose(None)) == []


def test_command_line_selects_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text("def train():\n    import drivetrain\n    drivetrain.report({'x': 1})\n")
    monkeypatch.setenv("DRIVETRAIN_COMMAND", "{worker}")
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path))

    status = main(["run", "job.py:train", "--num-workers", "2", "--runtime", "command", "--name", "run"])

    assert status == 0
    assert Result.from_path(tmp_path / "run").metrics["x"] == 1
