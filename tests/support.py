"""Helpers shared by the tests of several folders: messages from other processes, and waits with a deadline."""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from drivetrain import Callback
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import LocalFilesystem
from drivetrain._worker.session import active_session
from drivetrain.plugin import Report

ROOT = Path(__file__).parents[1]
DEADLINE_S = 90.0
PROCESS_LIMIT_S = 300.0  # a process that a test has started hangs, even on a busy machine, if it takes longer
EPOLL_WAITS = {"232", "281", "441"} if os.uname().machine == "x86_64" else {"22", "441"}  # numbers of system calls
SEATS = "seat"  # a resource: the Ray of the tests has four units, and only one test requests them


class Pipe:
    """A named pipe between a test and processes that the test does not start itself.

    The processes send lines with :func:`send_line`, or wait in :func:`wait_for_release`; the test is on the other side.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._data = b""

    def receive(self, count: int = 1, *, deadline_s: float = DEADLINE_S) -> list[str]:
        """Return the next lines, in the order in which they arrived."""
        deadline = time.monotonic() + deadline_s
        while self._data.count(b"\n") < count:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"waited {deadline_s} s for {count} lines, got {self._data!r}"
            self._data += os.read(self._descriptor, 65536)
        *lines, self._data = self._data.split(b"\n", count)
        return [line.decode() for line in lines]

    def receive_pids(self, count: int) -> list[int]:
        """Return the next lines as process ids."""
        return [int(line) for line in self.receive(count)]

    def release(self, count: int = 1) -> None:
        """Release a number of waiting processes."""
        os.write(self._descriptor, b"." * count)

    def drain(self) -> None:
        """Discard unread lines and unused releases."""
        self._data = b""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, 65536):
                pass

    def close(self) -> None:
        os.close(self._descriptor)


def send_line(path: str, line: object) -> None:
    """Send a line to the test that made the :class:`Pipe`."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def wait_for_release(path: str) -> None:
    """Wait for one release at that :class:`Pipe`.

    A signal that arrives just before a blocking system call does not interrupt it. Python would handle the signal only
    when the call returns. Therefore, this function waits in short steps.
    """
    deadline = time.monotonic() + 2 * DEADLINE_S
    descriptor = os.open(path, os.O_RDWR)
    try:
        while not select.select([descriptor], [], [], 0.5)[0]:
            assert time.monotonic() < deadline, f"{path} was not released"
        os.read(descriptor, 1)
    finally:
        os.close(descriptor)


def release(path: str) -> None:
    """Release one process that waits at a :class:`Pipe`, from a process other than the test's."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, b".")
    finally:
        os.close(descriptor)


def wait_for_stop_step() -> None:
    """Wait, in a train function whose ranks must stop, until the driver has sent this rank the stop step.

    The stop step is one more than the largest number of steps of any rank. So it is known exactly if all ranks wait
    here after the same step.
    """
    step = active_session("wait_for_stop_step").preemption.wait_for_stop_step(DEADLINE_S)
    assert step is not None, f"waited {DEADLINE_S} s for the stop step"


def wait_until_exited(pids: Iterable[int], *, deadline_s: float = DEADLINE_S) -> None:
    """Wait until all of the processes have exited."""
    deadline = time.monotonic() + deadline_s
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                left.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        finally:
            os.close(descriptor)
    assert not left, f"still running after {deadline_s} s: {left}"


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    """Return a free port for a server that a test will start.

    The kernel assigns higher numbers to the sockets of other processes, so none of them gets this port in the meantime.
    """
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def python_path() -> str:
    """Return a ``PYTHONPATH`` with which another process can import the tests."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def local_storage(directory: Path) -> Storage:
    """Return a run directory on this machine's disk."""
    return Storage(LocalFilesystem(), str(directory))


class Driver:
    """A script that runs in a separate process, as a user would start it.

    All processes that it starts, and that inherit its environment, can be identified by a mark in that environment.
    """

    _PREAMBLE = (
        "import faulthandler, signal\nfaulthandler.enable()\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )

    def __init__(self, directory: Path, source: str, arguments: Any, environment: dict[str, str]) -> None:
        script = directory / "driver_script.py"
        script.write_text(self._PREAMBLE + source)
        self._mark = f"DRIVETRAIN_TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(arguments)],
            cwd=directory,
            env={**os.environ, **environment, "PYTHONPATH": python_path(), name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def wait(self, *, deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
        """Return its exit status, standard output and standard error."""
        try:
            output, errors = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # makes it write the stacks of its threads
            output, errors = self.process.communicate(timeout=DEADLINE_S)
            raise AssertionError(f"the driver is still running after {deadline_s} s:\n{output}\n{errors}") from None
        return self.process.returncode, output, errors

    def wait_until_it_waits_for_events(self, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until its main thread is blocked in the wait for events, so that it has handled all earlier events."""
        deadline = time.monotonic() + deadline_s
        system_call = ""
        while system_call not in EPOLL_WAITS:
            assert time.monotonic() < deadline, f"the driver does not wait for events, but: {system_call}"
            # This is "running" if the thread could run, even in the middle of a system call.
            system_call = Path(f"/proc/{self.process.pid}/syscall").read_text().split()[0]

    def interrupt(self) -> None:
        """Send Ctrl-C as a terminal does: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the driver alone, and wait until it has exited."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def offspring(self) -> list[int]:
        """Return the pids of processes with this driver's mark, except the driver itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.process.pid:
                continue
            with contextlib.suppress(OSError):
                if self._mark.encode() in (entry / "environ").read_bytes() and is_running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def wait_until_nothing_is_left(self, *, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while pids := self.offspring():
            wait_until_exited(pids, deadline_s=max(0.0, deadline - time.monotonic()))

    def clean_up(self) -> None:
        """Kill the processes that a failed test has left."""
        for pid in [self.process.pid, *self.offspring()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def run_with_new_cluster(module: str, *arguments: str, directory: Path, timeout_s: float = 600.0) -> tuple[Any, str]:
    """Run a module that starts a Ray cluster. Return its result, the JSON of its last line, and its standard error.

    The directory is emptied first. Try again if a node has exceeded the 30 s that Ray gives it to start, as on a busy
    machine.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "TMPDIR")}
    for _ in range(3):
        shutil.rmtree(directory)
        directory.mkdir()
        finished = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            env={**environment, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONPATH": python_path()},
            check=False,
        )
        if finished.returncode == 0 or "timed out during startup" not in finished.stderr:
            break
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1]), finished.stderr


class Collector(Callback):
    """Records the callback events of a run."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.checkpoints: list[str] = []
        self.failures: list[Any] = []
        self.attempts = 0

    def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
        self.attempts += 1

    def on_report(self, run: Any, report: Report) -> None:
        self.reports.append(report)

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        self.checkpoints.append(checkpoint.name)

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        self.failures.append(failure)

    def metrics_of(self, rank: int) -> list[dict[str, Any]]:
        return [report.metrics for report in self.reports if report.rank == rank]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file under a directory, with its modification time and content."""
    return {
        str(file.relative_to(directory)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@contextlib.contextmanager
def open_pipe(path: Path) -> Iterator[Pipe]:
    """Create a :class:`Pipe` for the duration of a ``with`` block."""
    pipe = Pipe(path)
    try:
        yield pipe
    finally:
        pipe.close()
