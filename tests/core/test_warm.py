"""Scripts in drivers that are forked from a warm server, compared with the same scripts under Python."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain._runtimes.processes import fork_process
from drivetrain._runtimes.warm import abstract_name, digest_of
from drivetrain.plugin.warm import WarmServer, seconds_of, warm_servers
from tests.support import PROCESS_LIMIT_S, wait_until_exited

_ANOTHER_USER = 65534
DRIVETRAIN = str(Path(sys.executable).with_name("drivetrain"))
HEAD = "import os\nimport sys\nimport heavy\n"

TRAIN = """
import json
import os
import random
import sys

import heavy

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, get_context


def train_func():
    facts = {"draw": random.random(), "imported_by": heavy.imported_by, "parent": os.getppid()}
    with open(f"{sys.argv[1]}/rank{get_context().get_world_rank()}.json", "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=sys.argv[1], verbose=0, preload=["heavy"]),
    ).fit()
"""


class User:
    """A user with a script and an installed module, who runs commands in a terminal.

    Args:
        directory: the directory of the script.
        site: the directory of the installed module ``heavy``, which knows the process that has imported it.
    """

    def __init__(self, directory: Path, site: Path) -> None:
        self.directory = directory
        self.site = site
        self.environment = {**os.environ, "PYTHONPATH": str(site)}
        self.environment.pop("DRIVETRAIN_KEEP_WARM", None)
        self._processes: list[subprocess.Popen[str]] = []

    def write(self, text: str) -> None:
        (self.directory / "train.py").write_text(text)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env={**self.environment, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def leave(self) -> None:
        """Kill all processes, and the servers."""
        for process in self._processes:
            process.kill()
            with process:  # closes its pipes, and waits
                pass
        for server in self.servers():
            os.kill(server.pid, signal.SIGKILL)

    def start_script(self) -> tuple[subprocess.Popen[str], str]:
        """Run the script with ``drivetrain run``. Return the process, and the first line of its output."""
        process = self.start(DRIVETRAIN, "run", "train.py")
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], PROCESS_LIMIT_S)[0]
        return process, process.stdout.readline().strip()

    def run(self, *arguments: str, typed: str = "", **variables: str) -> tuple[int, str, str]:
        """Run ``drivetrain`` with arguments. Return its exit code and its output."""
        return finish(self.start(DRIVETRAIN, *arguments, **variables), typed)

    def run_with_python(self, *arguments: str, typed: str = "") -> tuple[int, str, str]:
        """Run the script with Python."""
        return finish(self.start(sys.executable, "train.py", *arguments), typed)

    def servers(self) -> list[WarmServer]:
        """Return the servers of this user's environment, without those of other tests and programs."""
        found = []
        for server in warm_servers():
            with contextlib.suppress(OSError):  # it has ended
                if os.fsencode(self.site) in Path(f"/proc/{server.pid}/environ").read_bytes():
                    found.append(server)
        return found

    def warm(self) -> WarmServer:
        """Start a warm server for the script."""
        code, _, errors = self.run("warm", "start", "train.py", "--keep-warm", "5m")
        assert code == 0, errors
        (server,) = self.servers()
        return server


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a state of a process that is no child, of which no event tells."""
    deadline = time.monotonic() + PROCESS_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not reached after {PROCESS_LIMIT_S} s"
        time.sleep(0.02)


def socket_of(server: WarmServer) -> str:
    """Return the address of a server."""
    return f"\0{abstract_name(digest_of(server.facts))}"


def finish(process: subprocess.Popen[str], typed: str = "") -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(typed, PROCESS_LIMIT_S)
    except BaseException:
        process.kill()
        raise
    return process.returncode, output, errors


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "heavy.py").write_text("import os\nimported_by = os.getpid()\n")
    directory = tmp_path / "work"
    directory.mkdir()
    user = User(directory, site)
    yield user
    user.leave()


def test_runs_start_from_a_server_that_has_the_imports(user: User) -> None:
    user.write(TRAIN)
    server = user.warm()
    assert "heavy" in server.modules
    found = []
    for _ in range(2):
        code, _, errors = user.run("run", "train.py", "--", str(user.directory))
        assert code == 0, errors
        found += [json.loads((user.directory / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert len({facts["imported_by"] for facts in found}) == 1  # it was imported once, for two drivers and four ranks
    assert len({facts["draw"] for facts in found}) == 4
    assert len({facts["parent"] for facts in found}) == 2
    (server,) = user.servers()
    assert (server.served, server.runs) == (2, 0)


def test_run_keeps_a_server_for_the_next_run(user: User) -> None:
    user.write(TRAIN)
    importers = []
    for options in (["--keep-warm", "5m"], [], ["--keep-warm=0"]):
        code, _, errors = user.run("run", *options, "train.py", "--", str(user.directory))
        assert code == 0, errors
        importers.append(json.loads((user.directory / "rank0.json").read_text())["imported_by"])
    assert importers[0] == importers[1] != importers[2]
    (server,) = user.servers()
    assert server.served == 1
    assert 200 < server.remaining_s <= 300


def test_a_changed_script_is_executed(user: User) -> None:
    user.write(HEAD + "print('before')")
    user.warm()
    assert user.run("run", "train.py") == (0, "before\n", "")
    user.write(HEAD + "import helper\nprint(helper.TEXT)")
    for text in ("one", "another"):
        (user.directory / "helper.py").write_text(f"TEXT = {text!r}")
        assert user.run("run", "train.py") == (0, f"{text}\n", "")
    assert [server.served for server in user.servers()] == [3]


@pytest.mark.parametrize(
    "rest",
    [
        "print(sys.argv, os.getcwd(), sys.path[0], __name__, __file__)",
        "print(input().upper(), input())",
        "print(os.environ['SHLVL'], 'A_VARIABLE' in os.environ, sys.stdout.isatty(), sys.stdout.line_buffering)",
        "print('a result')\nsys.exit(3)",
        "sys.exit('a message')",
        "def fail():\n    raise ValueError('expected')\n\nfail()",
        "this is no Python",
        "import signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "import signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "import atexit\natexit.register(print, 'the end')",
        "os.umask(umask := os.umask(0))\nprint(umask, os.nice(0), os.getpgrp() == os.getpid() or 'group')",
        "print(sys.modules['__main__'].__dict__ is globals(), sorted(globals()))",
        "import threading\nthreading.Timer(0.1, print, ['from a thread']).start()",
    ],
)
def test_a_script_behaves_as_under_python(user: User, rest: str) -> None:
    user.environment["SHLVL"] = "7"
    user.write(HEAD)
    user.warm()
    user.write(f"{HEAD}A_CONSTANT = 1\n{rest}")
    expected = user.run_with_python("--an", "argument", typed="first\nsecond\n")
    found = user.run("run", "train.py", "--", "--an", "argument", typed="first\nsecond\n")
    if "getpgrp" in rest:
        expected = (expected[0], expected[1].replace("group", "True"), expected[2])
    assert found == expected
    assert [server.served for server in user.servers()] == ["SyntaxError" not in expected[2]]


@pytest.mark.parametrize(
    "change",
    [
        lambda user: {"A_VARIABLE": "1"},
        lambda user: {"PYTHONOPTIMIZE": "1"},
        lambda user: (user.site / "heavy.py").write_text("import os\nimported_by = -os.getpid()\n") and {},
        lambda user: (user.site / "new_package.py").touch() or {},
        lambda user: (user.directory / "heavy.py").write_text("import os\nimported_by = 'shadow'\n") and {},
        lambda user: user.write(HEAD + "import json\nprint(heavy.imported_by)") or {},
    ],
    ids=["variable", "option", "changed module", "new module", "module next to the script", "new import"],
)
def test_anything_else_is_not_served(user: User, change: Any) -> None:
    user.write(HEAD + "print(heavy.imported_by)")
    user.warm()
    before = user.run("run", "train.py")
    assert user.run("run", "train.py") == before
    assert user.run("run", "train.py", **change(user))[:2] != before[:2]
    assert [server.served for server in user.servers()] in ([], [2])


WAITS = HEAD + "import time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_script(user: User, number: signal.Signals) -> None:
    user.write(WAITS)
    user.warm()
    process, pid = user.start_script()
    process.send_signal(number)
    code, _, errors = finish(process)
    assert code == -number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    wait_until_exited([int(pid)])


def test_a_handler_of_the_script_decides(user: User) -> None:
    user.write(
        HEAD + "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('handled', flush=True) or sys.exit(5))\n"
        "print(os.getpid(), flush=True)\nsignal.pause()"
    )
    user.warm()
    process, _ = user.start_script()
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[:2] == (5, "handled\n")


def test_script_stops_and_continues_with_its_client(user: User) -> None:
    user.write(WAITS)
    user.warm()
    process, pid = user.start_script()
    process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    wait_until(lambda: state(int(pid)) == "T")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == -signal.SIGTERM
    wait_until_exited([int(pid)])


def state(pid: int) -> str:
    """Return the state of a process, such as ``"T"`` if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_script_ends_if_its_client_dies(user: User) -> None:
    user.write(WAITS)
    server = user.warm()
    process, pid = user.start_script()
    process.kill()
    finish(process)
    wait_until_exited([int(pid)])
    assert [each.pid for each in user.servers()] == [server.pid]


def test_client_ends_if_the_server_dies(user: User) -> None:
    user.write(WAITS)
    server = user.warm()
    process, pid = user.start_script()
    os.kill(server.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    wait_until_exited([int(pid)])


def test_stop_lets_the_last_run_end(user: User) -> None:
    user.write(HEAD + "print(heavy.imported_by, flush=True)\ninput()\nprint('the end')")
    server = user.warm()
    process, first = user.start_script()
    assert user.run("warm", "stop", "train.py") == (0, f"process {server.pid} ends after its runs\n", "")
    assert not user.servers()
    code, output, _ = user.run("run", "train.py", typed="\n")  # makes the imports itself
    assert (code, output.splitlines()[0] != first) == (0, True)
    assert finish(process, "\n") == (0, "the end\n", "")
    wait_until_exited([server.pid])


def test_server_ends_after_its_time(user: User) -> None:
    user.write(HEAD)
    assert user.run("warm", "start", "train.py", "--keep-warm", "1s")[0] == 0
    wait_until_exited([server.pid for server in user.servers()])
    assert not user.servers()


def test_server_survives_what_is_no_client(user: User) -> None:
    user.write(HEAD + "print('served')")
    address = socket_of(user.warm())
    for data in (
        b"",
        b"\n",
        b"[]\n",
        b"null\n",
        b"\xff\n",
        b'{"command": "run"}\n',
        b'{"command": 1}\n',
        b"[" * 100000 + b"\n",
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PROCESS_LIMIT_S)
            connection.connect(address)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1 << 16)
    assert user.run("run", "train.py") == (0, "served\n", "")
    assert [server.served for server in user.servers()] == [1]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_other_users_get_no_reply(user: User) -> None:
    user.write(HEAD)
    address = socket_of(user.warm())
    assert has_reply(address, os.getuid())
    assert not has_reply(address, _ANOTHER_USER)


def has_reply(address: str, uid: int) -> bool:
    """Return True if a server replies to a process of a user."""
    pid = fork_process()
    if pid == 0:
        code = 2
        try:
            os.setuid(uid)
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(address)
            connection.sendall(b'{"command": "status"}\n')
            code = 0 if connection.recv(1) else 1
        except ConnectionError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90.0), ("30s", 30.0), ("10m", 600.0), ("2h", 7200.0), ("1.5m", 90.0), ("0", 0.0)]
)
def test_times(text: str, expected: float) -> None:
    assert seconds_of(text) == expected


@pytest.mark.parametrize("text", ["", "m", "-1", "10 m", "1d", "ten"])
def test_wrong_times(user: User, text: str) -> None:
    user.write(HEAD)
    message = "expected a time such as 90, 30s, 10m or 2h"
    with pytest.raises(ValueError, match=message):
        seconds_of(text)
    code, _, errors = user.run("run", f"--keep-warm={text}", "train.py")
    assert (code, message in errors) == (2, True)


def test_wrong_requests_are_explained(user: User) -> None:
    user.write(HEAD)
    for arguments, message in (
        (["warm", "start", "missing.py"], "got the missing file missing.py"),
        (["warm", "start", "train.py", "--keep-warm", "0"], "expected a time above 0"),
    ):
        code, _, errors = user.run(*arguments)
        assert (code, message in errors) == (2, True)
    code, _, errors = user.run("warm", "stop", "1")
    assert (code, "expected a server that drivetrain warm status lists" in errors) == (3, True)
    code, _, errors = user.run("run", "train.py", DRIVETRAIN_KEEP_WARM="soon")
    assert (code, "the environment variable DRIVETRAIN_KEEP_WARM: expected a time" in errors) == (2, True)


def test_commands_list_the_servers(user: User) -> None:
    user.write(HEAD)
    server = user.warm()
    _, output, _ = user.run("warm", "status")
    assert f"process {server.pid}, for {user.directory}: os, sys, heavy; " in output
    _, output, _ = user.run("warm", "status", "--json")
    facts = {each["pid"]: each for each in json.loads(output)}[server.pid]
    assert (facts["modules"], facts["runs"], facts["served"]) == (["os", "sys", "heavy"], 0, 0)
    assert 0 < facts["memory_bytes"] < 1 << 30
    assert "warm servers" in user.run("doctor")[1]


def test_start_says_that_threads_prevent_it(user: User) -> None:
    (user.site / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, args=[60], daemon=True).start()\n"
    )
    user.write("import threaded")
    code, _, errors = user.run("warm", "start", "train.py")
    assert (code, "one of them has started a thread" in errors) == (1, True)


def test_start_names_the_imports_that_are_not_kept(user: User) -> None:
    user.write("import os\nimport heavy\nos.environ['A'] = 'b'\nimport json\n")
    code, output, _ = user.run("warm", "start", "train.py")
    assert (code, "note: the imports from line 3 are made in each run" in output) == (0, True)
    user.write("import heavy\nimport pandas\nimport json\n")
    code, output, _ = user.run("warm", "start", "train.py")
    assert (code, "note: pandas starts threads, so it and the imports after it" in output) == (0, True)


def test_status_explains_why_a_run_would_not_be_served(user: User) -> None:
    user.write(HEAD)
    server = user.warm()
    assert f"train.py would be served by process {server.pid}" in user.run("warm", "status", "train.py")[1]
    _, output, _ = user.run("warm", "status", "train.py", A_VARIABLE="1")
    assert f"served by process {server.pid}, because these differ: environment variable A_VARIABLE" in output
    user.write(HEAD + "import json\n")
    _, output, _ = user.run("warm", "status", "--json", "train.py")
    assert {each["pid"]: each["differences"] for each in json.loads(output)}[server.pid] == ["list of imports"]


def test_streams_and_arguments_are_as_under_python(user: User) -> None:
    user.write(HEAD)
    user.warm()
    user.write(
        HEAD + "print(repr(sys.stdin.read()), sys.stdin.mode, sys.stdin.name, sys.stdin.line_buffering)\n"
        "print(sys.stdin.seekable(), sys.stdout.seekable(), sys.orig_argv[-1])"
    )
    expected = user.run_with_python("argument", typed="a\r\nb\rc\n")
    assert user.run("run", "train.py", "--", "argument", typed="a\r\nb\rc\n") == expected
    assert [server.served for server in user.servers()] == [1]


def test_other_streams_are_not_served(user: User) -> None:
    user.write(HEAD + "print(sys.stdin.seekable())")
    user.warm()
    code, output, _ = finish(user.start("/bin/sh", "-c", f"exec {DRIVETRAIN} run train.py < train.py"))
    assert (code, output) == (0, "True\n")
    assert [server.served for server in user.servers()] == [0]


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&-", "8</dev/null", "7<train.py 9</dev/null"])
def test_closed_and_additional_descriptors_are_as_under_python(user: User, streams: str) -> None:
    user.write(HEAD)
    user.warm()
    user.write(
        HEAD + "def about(number):\n    try:\n        return os.readlink(f'/proc/self/fd/{number}')\n"
        "    except OSError:\n        return None\n\n"
        "streams = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]\n"
        "descriptors = [about(number) for number in (7, 8, 9)]\n"
        "with open('found', 'w') as file:\n    file.write(f'{streams} {descriptors}')\n"
    )
    found = []
    for command in (sys.executable, f"{DRIVETRAIN} run"):
        code, _, _ = finish(user.start("/bin/sh", "-c", f"exec {command} train.py {streams}"))
        found.append((code, (user.directory / "found").read_text()))
    assert found[0] == found[1]


def test_a_signal_reaches_only_the_script_and_no_other_process(user: User) -> None:
    user.write(
        HEAD + "import signal\nimport subprocess\nA_CONSTANT = 1\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: print(child.poll()) or child.kill() or sys.exit(4))\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    user.warm()
    process, _ = user.start_script()
    process.terminate()
    assert finish(process)[:2] == (4, "None\n")


def test_a_server_that_does_not_reply_is_not_used(user: User) -> None:
    user.write(HEAD + "print(heavy.imported_by)\nopen('runs', 'a').write('run ')")
    server = user.warm()
    first = user.run("run", "train.py")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        code, second, _ = user.run("run", "train.py")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (code, second != first) == (0, True)
    assert user.run("run", "train.py") == first  # the server replies after all that it has missed
    assert (user.directory / "runs").read_text() == "run run run "


def test_a_run_that_ends_early_keeps_a_server(user: User) -> None:
    user.write(HEAD + "print(heavy.imported_by)\nsys.exit(2)")
    _, first, _ = user.run("run", "--keep-warm", "5m", "train.py")
    wait_until(user.servers)  # it is forked after the imports of the first step
    assert [user.run("run", "train.py") for _ in range(2)] == [(2, first, "")] * 2


def test_multiprocessing_finds_the_classes_of_the_script(user: User) -> None:
    box = "class Box:\n    def __init__(self, content):\n        self.content = content\n"
    pool = "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
    result = "        print([box.content for box in pool.map(Box, range(3))])\n"
    user.write(f"{HEAD}import multiprocessing\n\n\n{box}\n\nif __name__ == '__main__':\n{pool}{result}")
    assert user.run("run", "train.py") == (0, "[0, 1, 2]\n", "")
    user.warm()
    assert user.run("run", "train.py") == (0, "[0, 1, 2]\n", "")
    assert [server.served for server in user.servers()] == [1]
