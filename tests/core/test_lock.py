"""The lock of a run directory: an operating-system lock or an object with a heartbeat. Holders are killed processes."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain import RunInUseError, StorageError
from drivetrain._storage.directory import Storage
from drivetrain._storage.lock import RunLock
from drivetrain._storage.remote import locate
from tests.support import DEADLINE_S, ROOT, Pipe, open_pipe, release, wait_until_exited

YEARS_S = 3e8

HOLDER = """
import os, sys
from pathlib import Path
from drivetrain._storage import lock
from tests.core.test_lock import storage_of
from tests.support import send_line, wait_for_release

kind, directory, pipe, gate, machine, forks = sys.argv[1:]
if machine:
    lock._machine = lambda: machine
with lock.RunLock(storage_of(kind, Path(directory)), beat_s=0.05).acquired():
    if forks:
        os.fork()
    send_line(pipe, os.getpid())
    wait_for_release(gate)
"""


def storage_of(kind: str, directory: Path) -> Storage:
    """Return a run directory on a filesystem of that kind, which several processes can see."""
    if kind == "local":
        return Storage(*locate(directory / "run", None, what="path"))
    filesystem: Any
    if kind == "fsspec":
        import fsspec

        filesystem = fsspec.filesystem("dir", path=str(directory), fs=fsspec.filesystem("file"))
    else:
        from pyarrow import fs

        filesystem = fs.SubTreeFileSystem(str(directory), fs.LocalFileSystem())
    return Storage(*locate("run", filesystem, what="path"))


class Holder:
    """Processes that hold the lock of a run."""

    def __init__(self, directory: Path, pipe: Pipe, gate: Pipe) -> None:
        self.directory = directory
        self.file = directory / "run" / ".lock"
        self._pipe = pipe
        self._gate = gate
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str, *, machine: str = "", forks: bool = False) -> list[int]:
        """Start a process, and return its pid, and its child's, once it holds the lock."""
        arguments = [kind, str(self.directory), self._pipe.path, self._gate.path, machine, "yes" if forks else ""]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._processes.append(
            subprocess.Popen([sys.executable, "-c", HOLDER, *arguments], env={**os.environ, "PYTHONPATH": paths})
        )
        pid = self._processes[-1].pid
        return sorted(self._pipe.receive_pids(2 if forks else 1), key=lambda found: found != pid)

    def kill(self) -> None:
        """Send SIGKILL to the started processes, but not to their children."""
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    (tmp_path / "run").mkdir()
    with open_pipe(tmp_path / "pipe") as pipe, open_pipe(tmp_path / "gate") as gate:
        made = Holder(tmp_path, pipe, gate)
        yield made
        made.kill()


def take_lock(kind: str, directory: Path, *, beat_s: float = 0.2) -> list[str]:
    """Take the lock and release it; return the messages."""
    messages: list[str] = []
    lock = RunLock(storage_of(kind, directory), messages.append, beat_s=beat_s)
    with lock.acquired():
        lock.check()
        assert json.loads((directory / "run" / ".lock").read_bytes())["pid"] == os.getpid()
    assert not (directory / "run" / ".lock").exists()
    return messages


@pytest.mark.parametrize("age", [0.0, YEARS_S, -YEARS_S])
@pytest.mark.parametrize("kind", ["local", "fsspec", "pyarrow"])
def test_lock_of_a_local_process_is_respected_while_it_lives_and_taken_at_once_after_it_was_killed(
    holder: Holder, capfd: pytest.CaptureFixture[str], kind: str, age: float
) -> None:
    (pid,) = holder.start(kind)
    os.utime(holder.file, (time.time() - age, time.time() - age))

    with pytest.raises(RunInUseError, match=rf"is in use by process {pid} on "):
        take_lock(kind, holder.directory)
    holder.kill()
    if holder.file.exists():
        os.utime(holder.file, (time.time() - age, time.time() - age))
    take_lock(kind, holder.directory, beat_s=DEADLINE_S)

    assert capfd.readouterr().err == "", "waited for the lock of a killed process"


def test_lock_of_a_killed_process_is_released_while_its_child_runs(holder: Holder) -> None:
    _, child = holder.start("local", forks=True)
    with pytest.raises(RunInUseError):
        take_lock("local", holder.directory)

    holder.kill()
    take_lock("local", holder.directory)

    os.kill(child, 0)  # raises if the child has exited
    release(str(holder.directory / "gate"))
    wait_until_exited([child])


@pytest.mark.parametrize("age", [0.0, YEARS_S, -YEARS_S])
@pytest.mark.parametrize("kind", ["fsspec", "pyarrow"])
def test_lock_of_another_machine_is_respected_while_its_heartbeat_lasts(holder: Holder, kind: str, age: float) -> None:
    (pid,) = holder.start(kind, machine="another")
    os.utime(holder.file, (time.time() - age, time.time() - age))

    with pytest.raises(RunInUseError, match=rf"process {pid} on "):
        take_lock(kind, holder.directory, beat_s=2.0)
    holder.kill()
    os.utime(holder.file, (time.time() - age, time.time() - age))
    began = time.monotonic()
    messages = take_lock(kind, holder.directory, beat_s=0.2)

    assert 0.5 <= time.monotonic() - began < 10.0
    assert [line.partition(" on ")[0] for line in messages] == [f"the run is locked by process {pid}"]


def write_lock_of_another_machine(storage: Storage) -> None:
    facts = {"token": "another", "pid": 1, "host": "elsewhere", "since": "yesterday"}
    storage.write_bytes(".lock", json.dumps(facts).encode())


@pytest.mark.parametrize("kind", ["fsspec", "pyarrow"])
def test_holder_whose_lock_was_taken_names_the_new_holder_and_leaves_the_lock_alone(tmp_path: Path, kind: str) -> None:
    (tmp_path / "run").mkdir()
    storage = storage_of(kind, tmp_path)
    lock = RunLock(storage, beat_s=0.02)

    with lock.acquired():
        (beating,) = [thread for thread in threading.enumerate() if thread.name == "drivetrain run lock"]
        # A heartbeat that is already in flight may overwrite it.
        deadline = time.monotonic() + DEADLINE_S
        while beating.is_alive():
            assert time.monotonic() < deadline
            write_lock_of_another_machine(storage)
            beating.join(0.1)
        with pytest.raises(StorageError, match="has been taken over by process 1 on elsewhere"):
            lock.check()
    assert json.loads(storage.read_bytes(".lock") or b"")["token"] == "another"


def test_lock_that_was_interrupted_while_it_was_taken_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    storage = storage_of("fsspec", tmp_path)
    lock = RunLock(storage)

    def interrupt(found: bytes | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lock, "_require", interrupt)
    with pytest.raises(KeyboardInterrupt), lock.acquired():
        pass

    assert storage.read_bytes(".lock") is None


def test_lock_object_that_this_process_left_behind_does_not_block_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    storage = storage_of("fsspec", tmp_path)
    with RunLock(storage).acquired():
        written = storage.read_bytes(".lock") or b""
        with pytest.raises(RunInUseError), RunLock(storage).acquired():
            pass
    storage.write_bytes(".lock", written)  # as if the request had arrived late

    with RunLock(storage).acquired():
        assert storage.read_bytes(".lock") != written
