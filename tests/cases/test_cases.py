"""Programs as users write them, each in a process of its own, compared with the same program without drivetrain.

A program states its expectation in its docstring, and exits with 1 if the expectation fails. Comments at its top say
how it is run:

    # arguments: local; inprocess      one run for each command line. Without this line: one run without arguments
    # campaign: ray                    command lines that run only with DRIVETRAIN_CASES=all, such as slow ones
    # standard input                   the program is read from the standard input, as in `python - < program.py`
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import PROCESS_LIMIT_S

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DRIVETRAIN_COMMAND": "{worker}"}
RUN_ALL = os.environ.get("DRIVETRAIN_CASES") == "all"


def command_lines(program: Path) -> Iterator[str]:
    """Yield the arguments of each run of a program."""
    text = program.read_text()
    for kind in ("arguments", "campaign") if RUN_ALL else ("arguments",):
        for line in re.findall(rf"^# {kind}: *(.*)$", text, re.MULTILINE):
            yield from (arguments.strip() for arguments in line.split(";"))
    if not re.search(r"^# (arguments|campaign):", text, re.MULTILINE):
        yield ""


def cases() -> Iterator[Any]:
    for program in sorted(PROGRAMS.glob("*.py")):
        for arguments in command_lines(program):
            marks = [pytest.mark.ray] if "ray" in arguments.split() else []
            yield pytest.param(program, arguments, marks=marks, id=f"{program.stem} {arguments}".strip())


@pytest.mark.slow
@pytest.mark.parametrize(("program", "arguments"), list(cases()))
def test_program_behaves_as_its_docstring_says(program: Path, arguments: str, tmp_path: Path) -> None:
    text = program.read_text()
    from_input = "\n# standard input\n" in text
    done = subprocess.run(
        [sys.executable, "-" if from_input else str(program), *arguments.split()],
        input=text if from_input else None,
        stdin=None if from_input else subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "DRIVETRAIN_STORAGE_PATH": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
