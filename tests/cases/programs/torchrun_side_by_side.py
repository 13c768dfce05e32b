"""Scripts and modules see the same under `drivetrain run` as under `torchrun`: their names, arguments, package and
environment variables, Ctrl-C as KeyboardInterrupt, and time to handle it. An invalid argument gives exit code 2."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, sys

facts = {"name": __name__, "package": __package__, "spec": getattr(__spec__, "name", None), "file": __file__}
facts |= {"argv": sys.argv, "first on path": sys.path[0], "directory": os.getcwd(), "variables": sorted(os.environ)}
if os.environ["RANK"] == "0":
    print("FACTS", json.dumps(facts), flush=True)
"""
MODULE = SCRIPT + "from .helper import VALUE\n"
INTERRUPTED = """
import os, time
from pathlib import Path

rank = os.environ["RANK"]
try:
    Path("ready" + rank).touch()
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    Path("saved" + rank).touch()
    raise
"""
ARGUMENTS = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
DRIVETRAIN = [sys.executable, "-m", "drivetrain", "run", "--num-workers", "2", "--quiet"]
LIMIT_S = 120
SET_BY_PYTHON_OR_SHELL = {"_"}

problems = []


def expect(holds: object, problem: str) -> None:
    if not holds:
        problems.append(problem)


def facts_of(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    _, found, facts = done.stdout.partition("FACTS ")
    assert found, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(facts.splitlines()[0])


def wait_for(names: list[str], process: subprocess.Popen[bytes]) -> None:
    while not all(Path(name).exists() for name in names):
        assert process.poll() is None, f"exit code {process.returncode}"


def compare(theirs: list[str], ours: list[str]) -> None:
    expected, got = facts_of(theirs), facts_of(ours)
    missing = {*expected.pop("variables")} - {*got.pop("variables")} - SET_BY_PYTHON_OR_SHELL
    expect(not missing, f"{ours[-3:]}: the variables {sorted(missing)} are missing")
    expect(got == expected, f"{ours[-3:]}: expected {expected}, got {got}")


if __name__ == "__main__":
    Path("script.py").write_text(SCRIPT)
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/helper.py").write_text("VALUE = 1\n")
    Path("package/train.py").write_text(MODULE)
    Path("interrupted.py").write_text(INTERRUPTED)
    Path("arguments.py").write_text(ARGUMENTS)

    compare([*TORCHRUN, "script.py", "--lr", "1"], [*DRIVETRAIN, "script.py", "--", "--lr", "1"])
    compare([*TORCHRUN, "-m", "package.train", "x"], [*DRIVETRAIN, "-m", "package.train", "--", "x"])
    facts = facts_of([*DRIVETRAIN, "package/train.py"])
    expect(facts["package"] == "package", f"package/train.py: {facts}")

    done = subprocess.run(
        [*DRIVETRAIN, "arguments.py", "--", "--epochs", "x"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    expect(done.returncode == 2, f"an invalid argument: exit code {done.returncode}")
    expect("invalid int value: 'x'" in done.stdout + done.stderr, f"an invalid argument: {done.stderr}")

    with subprocess.Popen([*DRIVETRAIN, "interrupted.py"], start_new_session=True) as process:
        wait_for(["ready0", "ready1"], process)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(LIMIT_S)
    expect(process.returncode == 128 + signal.SIGINT, f"Ctrl-C: exit code {process.returncode}")
    expect(all(Path(f"saved{rank}").exists() for rank in range(2)), "Ctrl-C: not all ranks could save")

    print("\n".join(problems) or "OK")
    sys.exit(bool(problems))
