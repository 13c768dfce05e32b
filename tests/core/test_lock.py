"""The lock of a run directory: an operating-system lock or an object with a heartbeat. Holders are killed processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drivetrain import RunConfig, RunInUseError, StorageError
from drivetrain._storage import lock as lock_module
from drivetrain._storage import rundir
from drivetrain._storage.directory import Storage
from drivetrain._storage.lock import RunLock
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._storage.remote import locate
from tests.support import DEADLINE_S, ROOT, Pipe, open_pipe, release, wait_until_exited

YEARS_S = 3e8

HOLDER = """
import os, sys
from pathlib import Path
from drivetrain._storage import holder, lock
from tests.core.test_lock import storage_of
from tests.support import send_line, wait_for_release

kind, directory, pipe, gate, machine, forks = sys.argv[1:]
if machine:
    holder.machine = lambda: machine
    lock.try_lock = lambda descriptor, kind: True  # on some network filesystems, a lock is only valid on its node
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


@pytest.fixture
def locks_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process lock a file that a process of another node has locked."""
    monkeypatch.setattr(lock_module, "try_lock", lambda descriptor, kind: True)


@pytest.mark.usefixtures("locks_of_this_node")
@pytest.mark.parametrize("age", [0.0, YEARS_S, -YEARS_S])
@pytest.mark.parametrize("kind", ["local", "fsspec", "pyarrow"])
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


@pytest.mark.usefixtures("locks_of_this_node")
@pytest.mark.parametrize("kind", ["local", "fsspec"])
def test_suspended_holder_notices_that_another_machine_has_taken_its_lock(tmp_path: Path, kind: str) -> None:
    (tmp_path / "run").mkdir()
    with open_pipe(tmp_path / "pipe") as pipe, open_pipe(tmp_path / "gate") as gate:
        script = SUSPENDED.format(kind=kind, directory=str(tmp_path), pipe=pipe.path, gate=gate.path)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})
        try:
            pipe.receive()
            process.send_signal(signal.SIGSTOP)
            take_lock(kind, tmp_path)
            process.send_signal(signal.SIGCONT)
            assert pipe.receive(2) == ["lost to another driver, which has ended", "check raises DT-705"]
            gate.release()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
    assert not (tmp_path / "run" / ".lock").exists()


SUSPENDED = """
from pathlib import Path
from drivetrain import RunInUseError
from drivetrain._storage import holder, lock
from tests.core.test_lock import storage_of
from tests.support import send_line, wait_for_release

holder.machine = lambda: "another"
lock.try_lock = lambda descriptor, kind: True


def lost(error):
    send_line({pipe!r}, f"lost to {{str(error).partition('taken over by ')[2]}}")
    try:
        taken.check()
    except RunInUseError as error:
        send_line({pipe!r}, f"check raises {{str(error)[1:7]}}")


taken = lock.RunLock(storage_of({kind!r}, Path({directory!r})), on_lost=lost, beat_s=0.2)
with taken.acquired():
    send_line({pipe!r}, "held")
    wait_for_release({gate!r})
"""


COMMITS = """
import os, signal
from pathlib import Path
from drivetrain import RunInUseError
from drivetrain._storage import filesystem, holder, lock
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.manifest import CheckpointManager
from tests.core.test_lock import storage_of
from tests.support import send_line

holder.machine = lambda: "another"
lock.try_lock = lambda descriptor, kind: True
storage = storage_of("local", Path({directory!r}))
run_lock = lock.RunLock(storage, beat_s={beat_s})


def commit(number):
    (Path({directory!r}) / "run" / f"checkpoint_{{number:06}}").mkdir()
    manager.commit(number=number, iteration=number, files={{0: {{"w": StoredFile(1)}}}}, metrics={{}})


def suspended(point):
    def suspend(path):
        if path.endswith("manifest.json"):
            send_line({pipe!r}, "suspended")
            os.kill(os.getpid(), signal.SIGSTOP)
    return suspend


with run_lock.acquired():
    manager = CheckpointManager(storage, check_lock=run_lock.check)
    manager.create_manifest()
    commit(1)
    if {point!r} == "before the check":
        check = run_lock.check
        def suspend_and_check():
            suspended("")("manifest.json")
            check()
        manager = CheckpointManager(storage, check_lock=suspend_and_check)
    else:
        filesystem.reach_replacement = suspended("")
    try:
        commit(2)
    except RunInUseError as error:
        send_line({pipe!r}, f"refused with {{str(error)[1:7]}}")
    else:
        send_line({pipe!r}, "committed")
"""


@pytest.mark.usefixtures("locks_of_this_node")
@pytest.mark.parametrize("point", ["before the check", "between the check and the commit"])
def test_driver_that_was_suspended_in_a_commit_cannot_commit_after_another_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(rundir, "RunLock", partial(RunLock, beat_s=0.2))
    (tmp_path / "run").mkdir()
    with open_pipe(tmp_path / "pipe") as pipe:
        script = COMMITS.format(directory=str(tmp_path), pipe=pipe.path, point=point, beat_s=0.2)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})
        try:
            pipe.receive()
            config = RunConfig(name="run", storage_path=tmp_path, resume="auto")
            storage = storage_of("local", tmp_path)
            storage.write_bytes("run.json", b'{"version": 1, "id": "a", "starts": 1}')
            with rundir.open_run(storage, config, {}, {}, b"", lambda line: None) as opened:
                assert [entry.number for entry in opened.checkpoints.committed] == [1]
                process.send_signal(signal.SIGCONT)
                assert pipe.receive() == ["refused with DT-705"]
            assert [entry.number for entry in CheckpointManager(storage).committed] == [1]
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("locks_of_this_node")
def test_late_heartbeat_does_not_bring_a_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    storage = storage_of("local", tmp_path)
    lost: list[RunInUseError] = []
    late = RunLock(storage, on_lost=lost.append, beat_s=0.2)
    reads, goes_on = threading.Event(), threading.Event()
    beat = late._beat

    def beat_late(place: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            reads.set()
            assert goes_on.wait(DEADLINE_S)
        beat(place)

    monkeypatch.setattr(late, "_beat", beat_late)
    with late.acquired():
        assert reads.wait(DEADLINE_S)
        with monkeypatch.context() as patch:
            patch.setattr("drivetrain._storage.holder.machine", lambda: "another")
            new = RunLock(storage, beat_s=0.2)
            with new.acquired():
                goes_on.set()
                deadline = time.monotonic() + DEADLINE_S
                beats = new._beats + 3
                while not lost or new._beats < beats:  # the new holder stays the holder
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                new.check()
                with pytest.raises(RunInUseError, match="DT-705"):
                    late.check()


def test_child_that_leaves_the_block_keeps_the_lock_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunLock(storage_of("local", tmp_path)).acquired():
        if (pid := os.fork()) == 0:
            try:
                raise SystemExit
            except SystemExit:
                pass
        else:
            os.waitpid(pid, 0)
    if pid == 0:
        os._exit(0)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("clock", ["CLOCK_BOOTTIME", "calendar"])
def test_lock_is_read_again_after_the_machine_has_slept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    (tmp_path / "run").mkdir()
    storage = storage_of("fsspec", tmp_path)
    lock = RunLock(storage)
    with lock.acquired():
        write_lock_of_another_machine(storage)
        lock.check()  # the lease is valid
        if clock == "calendar":
            now = time.time
            monkeypatch.setattr(time, "time", lambda: now() + 60)
        else:
            since_boot = time.clock_gettime
            monkeypatch.setattr(time, "clock_gettime", lambda kind: since_boot(kind) + 60)
        with pytest.raises(RunInUseError, match="DT-705"):
            lock.check()


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

    beat = lock._beat

    def interrupt(place: Any) -> None:
        beat(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(lock, "_beat", interrupt)
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
