"""mypy and pyright report the mistakes of users, and accept programs without mistakes.

Pyright is run from the distribution basedpyright, which contains Node.js: that of pyright downloads it when it runs.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path

import pytest

from tests.names import public_names
from tests.support import ROOT

FILES = Path(__file__).parent
MISTAKES, CORRECT, NAMES = "mistakes.py", "correct.py", "names.py"
STRICT = "# pyright: strict\n"
STRICT_NAMES = "# pyright: strict, reportUnknownMemberType=false\n"  # TensorFlow's classes have no types

# A first run of mypy analyzes the packages, and the libraries that they import.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Errors = Mapping[str, Mapping[int, str]]
"""The messages by file and line."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files to check."""
    directory = tmp_path_factory.mktemp("scripts")
    shutil.copy(FILES / MISTAKES, directory)
    directory.joinpath(CORRECT).write_text(STRICT + (FILES / CORRECT).read_text())
    directory.joinpath(NAMES).write_text(STRICT_NAMES + script_with_all_names())
    return directory


def script_with_all_names() -> str:
    """Return a script that uses every public name."""
    lines = []
    for module, names in groupby(public_names(), key=lambda found: found[0]):
        lines += [f"import {module}", "", f"of_{module.replace('.', '_')}: list[object] = ["]
        lines += [f"    {module}.{name}," for _, name in names]
        lines += ["]", ""]
    return "\n".join(lines)


def check_with_mypy(scripts: Path) -> Errors:
    config = ("--config-file", str(FILES / "mypy.ini"), "--cache-dir", str(ROOT / ".mypy_cache" / "tests"))
    output = run(sys.executable, "-m", "mypy", *config, "--output", "json", ".", directory=scripts)
    found = [json.loads(line) for line in output.splitlines()]
    return by_file((each["file"], each["line"], each["message"]) for each in found if each["severity"] == "error")


def check_with_pyright(scripts: Path) -> Errors:
    scripts.joinpath("pyrightconfig.json").write_text('{"typeCheckingMode": "standard", "pythonVersion": "3.10"}')
    program = Path(sys.executable).with_name("basedpyright")
    output = run(str(program), "--pythonpath", sys.executable, "--outputjson", directory=scripts)
    found = [each for each in json.loads(output)["generalDiagnostics"] if each["severity"] == "error"]
    return by_file((each["file"], each["range"]["start"]["line"] + 1, each["message"]) for each in found)


CHECKERS: Mapping[str, Callable[[Path], Errors]] = {"mypy": check_with_mypy, "pyright": check_with_pyright}


@pytest.fixture(scope="module", params=CHECKERS)
def errors(request: pytest.FixtureRequest, scripts: Path) -> Errors:
    """The errors that one of the checkers reports."""
    return CHECKERS[request.param](scripts)


def run(*command: str, directory: Path) -> str:
    finished = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert finished.returncode == 1, finished.stdout + finished.stderr  # there are errors
    return finished.stdout


def by_file(found: Iterable[tuple[str, int, str]]) -> Errors:
    errors: dict[str, dict[int, str]] = {MISTAKES: {}, CORRECT: {}, NAMES: {}}
    for file, line, message in found:
        errors[Path(file).name][line] = message
    return errors


def mistakes_by_line() -> dict[int, str]:
    """Return the mistake to which each line of the file belongs."""
    mistake, lines = "", {}
    for number, line in enumerate((FILES / MISTAKES).read_text().splitlines(), 1):
        if (marker := re.match(r"\s*# mistake: (.*)", line)) is not None:
            mistake = marker[1]
        lines[number] = mistake
    return lines


def test_every_mistake_is_reported(errors: Errors) -> None:
    mistakes = mistakes_by_line()
    reported = {mistakes[line] for line in errors[MISTAKES]}
    assert len(set(mistakes.values())) > 16
    assert set(mistakes.values()) - {""} == reported, errors[MISTAKES]


@pytest.mark.parametrize("file", [CORRECT, NAMES])
def test_strict_checks_accept_programs_without_mistakes(errors: Errors, file: str) -> None:
    assert not errors[file]
