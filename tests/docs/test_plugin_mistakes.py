"""The mistakes that the pages about plugins describe produce the messages that the pages show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.example_plugins import included_examples, install_examples
from tests.docs.pages import DOCS, PAGES, Page
from tests.support import ROOT

_HEADING = "## Common mistakes\n"
_ROW = re.compile(r"^\| (?P<mistake>.+?) \| `(?P<message>.+)` \|$", re.MULTILINE)

DESCRIBED = [page for page in PAGES if page.path.parent == DOCS / "plugins" and _HEADING in page.text]


def test_pages_of_hooks_describe_mistakes() -> None:
    makers = {path.stem for path in Path(__file__).with_name("mistakes").glob("[a-z]*.py")} - {"making"}
    assert {page.path.stem for page in DESCRIBED} == makers


@pytest.mark.parametrize("page", [pytest.param(page, id=page.path.stem) for page in DESCRIBED])
def test_mistake_produces_the_shown_message(page: Page, tmp_path: Path) -> None:
    plugins = install_examples(included_examples(page), tmp_path / "site")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.docs.mistakes", page.path.stem],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([plugins, str(ROOT)]),
            "DRIVETRAIN_STORAGE_PATH": str(tmp_path / "runs"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    shown: dict[str, list[str]] = json.loads(finished.stdout.splitlines()[-1])

    table = page.text.partition(_HEADING)[2]
    expected = {row["mistake"]: row["message"] for row in _ROW.finditer(table)}
    assert len(expected) == table.count("\n| ") - 1, "expected a mistake and a message in each row"
    assert expected.keys() == shown.keys()
    missing = [
        f"{mistake}: expected\n{expected[mistake]}\ngot\n{messages}"
        for mistake, messages in shown.items()
        if not any(contains(message, expected[mistake]) for message in messages)
    ]
    assert not missing, "\n\n".join(missing)


def contains(text: str, expected: str) -> bool:
    """Return True if a text contains a message, in which ``...`` stands for anything."""
    return re.search(".*".join(map(re.escape, expected.split("..."))), text, re.DOTALL) is not None
