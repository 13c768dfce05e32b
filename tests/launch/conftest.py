"""A real Slurm with two nodes on this machine, and Open MPI. Tests are skipped if they are not installed.

On Debian and Ubuntu: ``apt-get install --no-install-recommends slurm-wlm munge openmpi-bin``.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import DEADLINE_S, Driver, Pipe, free_port, open_pipe

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPort={ports[0]}
KillWait=30
NodeName=n1 NodeHostname={host} Port={ports[1]} CPUs=4 RealMemory=500 State=UNKNOWN
NodeName=n2 NodeHostname={host} Port={ports[2]} CPUs=4 RealMemory=500 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
START_DEADLINE_S = 90.0  # a daemon that starts before another one is ready retries with growing delays
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")


def require_programs(*names: str) -> None:
    """Skip the test if a program is not installed."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Mapping[str, str]]:
    """The variables that select a Slurm cluster with the nodes n1 and n2. Its daemons end with the module's tests."""
    require_programs(*SLURM_PROGRAMS)
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm require root")
    with contextlib.ExitStack() as stack:
        # The path of a socket must be short.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        directory.chmod(0o755)
        variables = {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        _configure(directory)
        for command in _daemons(directory):
            stack.enter_context(_running(command, directory, {**os.environ, **variables}))
        _await_nodes({**os.environ, **variables}, directory)
        yield variables


def _configure(directory: Path) -> None:
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    ports = [free_port() for _ in range(3)]
    text = CONFIGURATION.format(host=socket.gethostname(), directory=directory, ports=ports)
    (directory / "slurm.conf").write_text(text)


def _daemons(directory: Path) -> Iterator[list[str]]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    yield ["munged", "--foreground", "--force", *(f"--{name}={directory}/munge.{end}" for name, end in files.items())]
    yield ["slurmctld", "-D", "-c"]
    yield from (["slurmd", "-D", "-N", node] for node in ("n1", "n2"))


@contextlib.contextmanager
def _running(command: list[str], directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    with open(directory / "daemons.log", "ab") as log:
        daemon = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(DEADLINE_S)
        finally:
            daemon.kill()


def _await_nodes(environment: Mapping[str, str], directory: Path) -> None:
    """Wait until both nodes run jobs. A job waits for nodes itself, but not for the controller."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        command = ["srun", f"--immediate={DEADLINE_S:.0f}", "-N", "2", "true"]
        probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if probe.returncode == 0:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"{probe.stderr}\n{(directory / 'daemons.log').read_text()[-5000:]}")


@pytest.fixture
def environment(slurm: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Select the Slurm cluster in this process; also return its variables."""
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    return slurm


@pytest.fixture
def mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI, which root has to confirm."""
    require_programs("mpirun")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """Receives messages of worker processes."""
    with open_pipe(tmp_path / "pipe") as made:
        yield made


@pytest.fixture
def start_driver(tmp_path: Path) -> Iterator[Any]:
    """Start scripts with arguments and environment variables."""
    drivers: list[Driver] = []

    def start(source: str, arguments: Any, environment: Mapping[str, str]) -> Driver:
        drivers.append(Driver(tmp_path, source, arguments, dict(environment)))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.clean_up()


def list_jobs() -> list[str]:
    """Return the jobs of the Slurm cluster: their ids and states."""
    listed = subprocess.run(["squeue", "--noheader", "--format=%i %T"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def wait_for_empty_queue() -> None:
    """Wait until the Slurm cluster has no job."""
    deadline = time.monotonic() + DEADLINE_S
    while jobs := list_jobs():
        assert time.monotonic() < deadline, jobs
