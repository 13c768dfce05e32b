"""``drivetrain run``: functions of modules and files, and whole scripts, started as by a user."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain_console import main
from tests.support import PROCESS_LIMIT_S, Driver, open_pipe, read_lines

OK, BAD, USAGE = 0, 1, 2
PROGRAM = "import sys; from drivetrain_console import main; sys.exit(main())"

FUNCTIONS = """
from dataclasses import dataclass
import drivetrain
from helper import double

@dataclass
class Settings:
    lr: float

def train(config):
    context = drivetrain.get_context()
    print("hello from", context.get_world_rank())
    drivetrain.report({"lr": double(Settings(config["lr"]).lr), "size": context.get_world_size(), **config["more"]})

def fail(config):
    raise ValueError("no such column: price")

def wait(config):
    from tests.support import send_line
    import threading
    send_line(config["pipe"], "here")
    threading.Event().wait()
"""
SCRIPT = """
import argparse, pickle, sys
import drivetrain
from helper import double

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
epochs = parser.parse_args().epochs

class Model:
    weight = 3

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Model())).weight == 3
    for epoch in range(epochs):
        drivetrain.report({"epoch": epoch, "rank": drivetrain.get_context().get_world_rank(), "two": double(1)})
    if epochs > 5:
        raise ValueError("too many")
"""

DRIVER = """
import sys
import drivetrain

trainer = drivetrain.DataParallelTrainer(
    lambda: drivetrain.report({"size": drivetrain.get_context().get_world_size()}),
    scaling_config=drivetrain.ScalingConfig(num_workers=2),
    run_config=drivetrain.RunConfig(verbose=0),
)
print(trainer.fit().metrics["size"], __name__, sys.argv)
sys.exit(3)
"""
VARIABLES = """
import os

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
found = {name: os.environ[name] for name in names}
assert os.environ["GROUP_WORLD_SIZE"] == "1"
assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"

import socket
import drivetrain

address = found["MASTER_ADDR"], int(found["MASTER_PORT"])
if found["RANK"] == "0":
    socket.create_server(address).close()
drivetrain.report({"ranks": int(found["RANK"])}, reduce={"ranks": "sum"})
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's directory."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "more.json").write_text('{"more": {"batch": 8}}')
    return tmp_path


def run(place: Path, *arguments: str, limit_s: float = PROCESS_LIMIT_S) -> tuple[int, str, str]:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", *arguments],
        cwd=place,
        env={**os.environ, "DRIVETRAIN_STORAGE_PATH": str(place / "runs")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return finished.returncode, finished.stdout, finished.stderr


@pytest.mark.parametrize("target", ["functions.py:train", "functions:train"])
def test_function_runs_on_every_worker_with_its_config(place: Path, target: str) -> None:
    status, text, error = run(
        place, target, "--num-workers", "2", "--config", "lr=0.1", "--config", "more.json", "--name", "first", "--json"
    )
    assert status == OK, error
    assert error == ""
    result = json.loads(text)
    assert {name: result["metrics"][name] for name in ("lr", "size", "batch")} == {"lr": 0.2, "size": 2, "batch": 8}
    assert result["path"] == str(place / "runs" / "first")


def test_output_and_page_are_shown_on_request(place: Path) -> None:
    status, text, _ = run(
        place,
        *("functions.py:train", "--config", "lr=1", "--config", 'more={"x": 1}', "--num-workers", "2"),
        *("--output-of", "all", "--report", "page.html", "--name", "shown"),
    )
    assert status == OK
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1", f"the run is in {place}/runs/shown"} <= set(
        text.splitlines()
    )
    assert "<title>shown</title>" in (place / "page.html").read_text()


def test_name_that_is_taken_is_refused_with_the_option_that_resumes(place: Path) -> None:
    command = ["functions.py:train", "--config", "lr=1", "--config", 'more={"x": 1}', "--num-workers", "0"]
    assert run(place, *command, "--name", "taken")[0] == OK

    status, _, error = run(place, *command, "--name", "taken")

    assert status == USAGE
    assert "--resume auto" in error
    assert run(place, *command, "--name", "taken", "--resume", "auto")[0] == OK


def test_failed_training_has_an_exit_code_and_shows_the_users_line(place: Path) -> None:
    status, _, error = run(place, "functions.py:fail", "--report", "page.html", "--name", "bad")
    assert status == BAD
    assert 'raise ValueError("no such column: price")' in error
    assert "drivetrain: rank 0 failed" in error
    assert "no such column" in (place / "page.html").read_text()


def test_script_runs_as_main_on_every_worker_with_its_own_arguments(place: Path) -> None:
    status, _, error = run(place, "script.py", "--num-workers", "2", "--name", "s", "--", "--epochs", "3")
    assert status == OK, error
    reports = [read_lines(place / "runs" / "s" / name) for name in ("result.json", "result_rank_1.json")]
    assert [[(one["epoch"], one["rank"]) for one in rank] for rank in reports] == [
        [(epoch, rank) for epoch in range(3)] for rank in range(2)
    ]
    status, _, error = run(place, "script.py", "--num-workers", "1", "--name", "t", "--", "--epochs", "6")
    assert status == BAD
    assert 'raise ValueError("too many")' in error
    status, _, _ = run(place, "script.py", "--num-workers", "0", "-q", "--", "--epochs", "1")
    assert status == OK


def test_script_joins_the_process_group_of_the_backend(place: Path) -> None:
    pytest.importorskip("drivetrain_torch")
    (place / "group.py").write_text(
        "import drivetrain, torch, torch.distributed as dist\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "drivetrain.report({'total': total.item()})\n"
    )
    status, text, error = run(place, "group.py", "--num-workers", "2", "--backend", "torch", "--json")
    assert status == OK, error
    assert json.loads(text)["metrics"]["total"] == 2.0


def test_script_without_options_about_workers_runs_once_as_the_driver(place: Path) -> None:
    (place / "driver.py").write_text(DRIVER)
    status, text, error = run(place, "driver.py", "--", "--more", "x")
    assert status == 3, error
    assert text.splitlines() == ["2 __main__ ['driver.py', '--more', 'x']"]

    status, _, error = run(place, "script.py", "--", "--epochs", "1")
    assert status == BAD
    assert "[DT-801] get_context()" in error
    assert "drivetrain run SCRIPT --num-workers N" in error


def test_fit_in_a_script_of_workers_is_refused(place: Path) -> None:
    (place / "driver.py").write_text(DRIVER)
    status, _, error = run(place, "driver.py", "--num-workers", "2", "-q")
    assert status == BAD
    assert "[DT-131] fit()" in error
    assert "drivetrain run driver.py" in error


def test_script_has_the_variables_of_torchrun_before_its_first_line(place: Path) -> None:
    (place / "variables.py").write_text(VARIABLES)
    status, text, error = run(place, "variables.py", "--num-workers", "2", "--json")
    assert status == OK, error
    assert json.loads(text)["metrics"]["ranks"] == 1


def test_module_runs_as_main_of_its_package(place: Path) -> None:
    (place / "package").mkdir()
    (place / "package" / "__init__.py").write_text("")
    (place / "package" / "helper.py").write_text("VALUE = 5\n")
    (place / "package" / "fit.py").write_text(
        "import drivetrain, sys\n"
        "from .helper import VALUE\n"
        "def train():\n"
        "    drivetrain.report({'value': VALUE, 'arguments': len(sys.argv)})\n"
        "if __name__ == '__main__':\n"
        "    train()\n"
    )
    ways = {
        "script": ("package/fit.py", "--num-workers", "0", "--json", "--", "x"),
        "module": ("-m", "package.fit", "--num-workers", "0", "--json", "--", "x"),
        "function": ("package/fit.py:train", "--num-workers", "1", "--json"),
    }
    for way, words in ways.items():
        status, text, error = run(place, *words)
        assert status == OK, (way, error)
        assert json.loads(text)["metrics"]["value"] == 5, way


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("sys.exit(7)", 7, "SystemExit: 7 "),
        ("sys.exit('no data')", BAD, "SystemExit: no data"),
        ("sys.exit(0)", OK, ""),
        ("1 / 0", BAD, "ZeroDivisionError"),
        (
            "\ntry:\n    open('missing.csv')\nexcept OSError:\n    sys.exit(4)",
            4,
            "SystemExit: 4, called after FileNotFoundError: [Errno 2] No such file or directory: 'missing.csv'",
        ),
    ],
)
def test_exit_code_of_a_script_is_kept_and_its_exception_is_named(
    place: Path, end: str, status: int, message: str
) -> None:
    (place / "ends.py").write_text(f"import sys\nprint('started'); {end}\n")
    got, _, error = run(place, "ends.py", "--num-workers", "1", "-q")
    assert got == status, error
    assert message in error


def test_output_that_explains_an_exit_is_part_of_the_error(place: Path) -> None:
    (place / "explains.py").write_text("import sys\nprint('the GPU is on fire')\nsys.exit(2)\n")
    status, _, error = run(place, "explains.py", "--num-workers", "1", "-q", "--output-of", "none")
    assert status == USAGE
    assert "the GPU is on fire" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_script_handles_the_signal_of_the_driver(place: Path, number: int) -> None:
    with open_pipe(place / "pipe") as pipe:
        (place / "handles.py").write_text(
            "import signal, sys, threading\n"
            "from tests.support import send_line\n"
            "def save(number, frame):\n"
            f"    send_line({str(pipe.path)!r}, 'saved')\n"
            "    sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, save)\n"
            "try:\n"
            f"    send_line({str(pipe.path)!r}, 'ready')\n"
            "    while True:\n"
            "        threading.Event().wait(0.1)\n"
            "except KeyboardInterrupt:\n"
            "    save(None, None)\n"
        )
        driver = Driver(
            place,
            "from drivetrain_console import main; import sys\n"
            "sys.exit(main(['run', 'handles.py', '--num-workers', '2']))\n",
            None,
            {"DRIVETRAIN_STORAGE_PATH": str(place / "runs")},
        )
        try:
            pipe.receive(2)
            driver.process.send_signal(number)
            assert pipe.receive(2) == ["saved", "saved"]
            assert driver.wait()[0] == 128 + number
            driver.wait_until_nothing_is_left()
        finally:
            driver.clean_up()


@pytest.fixture
def at_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in the user's directory; modules imported from there are unloaded afterwards."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(place / "runs"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield place
    for name in set(sys.modules) - before:
        if str(place) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["functions.py:trian"], "Known functions: Settings, train, fail, wait"),
        (["nothing.py"], "got the missing file nothing.py"),
        (["nothing:train"], "got 'nothing'"),
        (["-m", "nothing.at_all"], "got 'nothing.at_all'"),
        (["-m", "script:train"], "got 'script:train'"),
        (["helper"], "or -m module, got 'helper'"),
        (["script.py", "--config", "a=1"], "Pass its arguments after --"),
        (["script.py", "--name", "a"], "--name: expected a script that runs on workers"),
        (["script.py", "--json"], "--json: expected a script that runs on workers"),
        (["functions.py:train", "--", "--epochs", "3"], "Use --config NAME=VALUE"),
        (["functions.py:train", "--num-workers", "many"], "expected a number or MIN:MAX"),
        (["functions.py:train", "--config", "lr"], "expected NAME=VALUE or a JSON file"),
        (["functions.py:train", "--backend", "torhc"], "no backend 'torhc' is installed"),
    ],
)
def test_invalid_target_is_refused_before_the_start(
    at_home: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == USAGE
    assert message in capsys.readouterr().err
    assert not (at_home / "runs").exists()


def test_ctrl_c_ends_the_run_and_its_workers(place: Path) -> None:
    with open_pipe(place / "pipe") as pipe:
        driver = Driver(
            place,
            f"sys_argv = {['run', 'functions.py:wait', '--num-workers', '2', '--config', f'pipe={pipe.path}']}\n"
            "from drivetrain_console import main; import sys; sys.exit(main(sys_argv))\n",
            None,
            {"DRIVETRAIN_STORAGE_PATH": str(place / "runs")},
        )
        try:
            pipe.receive(2)
            driver.interrupt()
            assert driver.wait()[0] == 128 + signal.SIGINT
            driver.wait_until_nothing_is_left()
        finally:
            driver.clean_up()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("script.py --epochs 10", "after --: drivetrain run script.py -- --epochs 10"),
        ("script.py --num-workers 2 --output a", "drivetrain run script.py --num-workers 2 -- --output a"),
        ("-m package.train data --lr=1", "drivetrain run -m package.train -- data --lr=1"),
        ("--epochs 10 script.py", "Pass the arguments of a script after --"),
        ("script.py:train --lr 1", "--config NAME=VALUE"),
        ("script.py --nproc_per_node 2", "--nproc_per_node: use --num-workers"),
        ("--standalone --nproc-per-node=2 script.py --lr 1", "--nproc-per-node: use --num-workers"),
        ("script.py --num_workers 2", "--num_workers: write --num-workers"),
        ("script.py --max-restarts 3", "use --max-failures"),
    ],
)
def test_unknown_argument_is_refused_with_a_remedy(
    arguments: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments.split()]) == USAGE
    assert remedy in capsys.readouterr().err
