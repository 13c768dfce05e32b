"""Directories shared by the processes of one node, some of which are killed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, StorageError
from drivetrain._storage import node as node_module
from drivetrain._storage.node import share_directory, sweep
from tests.support import ROOT, Pipe, open_pipe, release

USER = """
import os, sys
from pathlib import Path
from drivetrain._storage.node import share_directory
from tests.support import send_line, wait_for_release

key, pipe, filled, left = sys.argv[1:]

def fill(path):
    Path(path, f"of {os.getpid()}").write_text("a part")
    send_line(pipe, f"fills {os.getpid()}")
    wait_for_release(filled)
    Path(path, "whole").write_text("all of it")

def before_deletion(path):
    send_line(pipe, f"is last {os.getpid()} {sorted(os.listdir(path))}")

with share_directory("downloads", key, fill=fill, before_deletion=before_deletion) as path:
    send_line(pipe, f"has {os.getpid()} {path}")
    wait_for_release(left)
"""


class Node:
    """Processes that share directories in a temporary directory of the test."""

    def __init__(self, directory: Path, pipe: Pipe, filled: Pipe) -> None:
        self.base = directory / f"drivetrain-{os.getuid()}-private" / "downloads"
        self.pipe = pipe
        self._directory = directory
        self._filled = filled
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._left: dict[int, str] = {}

    def start(self, key: str) -> int:
        """Start a process that uses a directory."""
        left = self._directory / f"leave {len(self._left)}"
        os.mkfifo(left)
        arguments = [key, self.pipe.path, self._filled.path, str(left)]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-c", USER, *arguments],
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self._directory)},
        )
        self._processes[process.pid] = process
        self._left[process.pid] = str(left)
        return process.pid

    def start_and_fill(self, key: str) -> int:
        """Start the first process that uses a directory, and let it fill the directory."""
        pid = self.start(key)
        assert self.pipe.receive() == [f"fills {pid}"]
        self.fill()
        assert self.pipe.receive() == [f"has {pid} {self.base / key}"]
        return pid

    def fill(self) -> None:
        """Let a process that fills a directory continue."""
        self._filled.release()

    def leave(self, pid: int) -> None:
        """Let a process leave its directory and exit."""
        release(self._left[pid])
        assert self._processes.pop(pid).wait(30) == 0

    def kill(self, pid: int) -> None:
        """``kill -9``."""
        process = self._processes.pop(pid)
        process.kill()
        process.wait()

    def clean_up(self) -> None:
        for pid in list(self._processes):
            self.kill(pid)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_pipe(tmp_path / "pipe") as pipe, open_pipe(tmp_path / "filled") as filled:
        made = Node(tmp_path, pipe, filled)
        yield made
        made.clean_up()


def test_directory_is_filled_by_one_process_and_deleted_by_the_last_one_to_leave(node: Node) -> None:
    pids = {node.start("weights") for _ in range(3)}
    (message,) = node.pipe.receive()
    filler = int(message.removeprefix("fills "))
    node.fill()
    messages = node.pipe.receive(3)
    assert set(messages) == {f"has {pid} {node.base / 'weights'}" for pid in pids}

    others = sorted(pids - {filler})
    for pid in (filler, others[0]):
        node.leave(pid)
        assert (node.base / "weights" / "whole").read_text() == "all of it", "another process still uses it"
    node.leave(others[1])

    assert node.pipe.receive() == [f"is last {others[1]} {sorted([f'of {filler}', 'whole'])}"]
    assert os.listdir(node.base) == []


def test_directories_of_different_keys_are_different(node: Node) -> None:
    first, second = node.start_and_fill("first"), node.start_and_fill("second")
    node.leave(first)
    assert sorted(os.listdir(node.base)) == ["second", "second.lock", "second.ready"]
    node.leave(second)
    assert os.listdir(node.base) == []


def test_directory_of_a_process_killed_while_filling_it_is_not_used(node: Node) -> None:
    killed = node.start("weights")
    assert node.pipe.receive() == [f"fills {killed}"]
    node.kill(killed)
    assert os.listdir(node.base / "weights") == [f"of {killed}"]

    next_one = node.start_and_fill("weights")

    assert sorted(os.listdir(node.base / "weights")) == sorted([f"of {next_one}", "whole"])


def test_waiting_process_fills_the_directory_if_the_filling_process_is_killed(node: Node) -> None:
    pids = {node.start("weights"), node.start("weights")}
    (message,) = node.pipe.receive()
    killed = int(message.removeprefix("fills "))
    (other,) = pids - {killed}
    node.kill(killed)

    assert node.pipe.receive() == [f"fills {other}"]
    node.fill()
    assert node.pipe.receive() == [f"has {other} {node.base / 'weights'}"]
    assert sorted(os.listdir(node.base / "weights")) == sorted([f"of {other}", "whole"])


def test_directory_of_a_killed_process_is_kept_for_the_processes_that_still_use_it(node: Node) -> None:
    killed = node.start_and_fill("weights")
    other = node.start("weights")
    assert node.pipe.receive() == [f"has {other} {node.base / 'weights'}"]
    node.kill(killed)
    sweep("downloads")
    assert (node.base / "weights" / "whole").exists()

    node.leave(other)

    assert os.listdir(node.base) == []


def test_sweep_deletes_only_the_directories_of_killed_processes(node: Node) -> None:
    sweep("downloads")
    assert not node.base.exists(), "it makes nothing"
    killed, living, filling = node.start_and_fill("killed"), node.start_and_fill("living"), node.start("filling")
    assert node.pipe.receive() == [f"fills {filling}"]
    killed_while_it_fills = node.start("never whole")
    assert node.pipe.receive() == [f"fills {killed_while_it_fills}"]
    node.kill(killed)
    node.kill(killed_while_it_fills)
    assert {"killed", "never whole"} < set(os.listdir(node.base))

    sweep("downloads")

    names = {name.partition(".")[0] for name in os.listdir(node.base)}
    assert names == {"living", "filling"}
    node.fill()
    assert node.pipe.receive() == [f"has {filling} {node.base / 'filling'}"]
    for pid in (living, filling):
        node.leave(pid)
    assert os.listdir(node.base) == []


def test_new_directory_of_a_kind_triggers_deletion_of_those_of_killed_processes(node: Node) -> None:
    node.kill(node.start_and_fill("killed"))

    with share_directory("downloads", "next") as path:
        assert sorted(os.listdir(node.base)) == ["next", "next.lock", "next.ready"]
        assert os.listdir(path) == []
    assert os.listdir(node.base) == []


def test_wait_for_a_filling_process_is_bounded_and_names_the_process(node: Node) -> None:
    filling = node.start("weights")
    assert node.pipe.receive() == [f"fills {filling}"]

    with (
        pytest.raises(
            StorageError, match=rf"expected process {filling} on this node to fill the directory within 0\.1 s"
        ),
        share_directory("downloads", "weights", wait_s=0.1),
    ):
        pass


def test_sweep_while_the_last_process_leaves_deletes_nothing_of_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = node_module.try_lock
    swept: list[str] = []

    def sweep_first(descriptor: int, kind: int) -> bool:
        monkeypatch.setattr(node_module, "try_lock", real)
        sweep("downloads")
        swept.extend(os.listdir(node.base))
        return real(descriptor, kind)

    last: list[list[str]] = []
    with share_directory("downloads", "weights", before_deletion=lambda path: last.append(os.listdir(path))) as path:
        Path(path, "result").touch()
        monkeypatch.setattr(node_module, "try_lock", sweep_first)

    assert "weights" in swept
    assert last == [["result"]]
    assert os.listdir(node.base) == []


def test_run_deletes_the_files_that_a_killed_process_has_downloaded(node: Node, tmp_path: Path) -> None:
    node.kill(node.start_and_fill("weights"))

    run_config = RunConfig(storage_path=tmp_path / "runs", verbose=0)
    DataParallelTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=0), run_config=run_config).fit()

    assert os.listdir(node.base) == []
