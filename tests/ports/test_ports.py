"""The comparison itself, with a program that is written here. Public programs need their repositories."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.pages import DOCS
from tests.ports.port import PYTHON, Edit, Port
from tests.ports.programs import PORTS
from tests.ports.running import compare

PROGRAM = """\
import probe

total, first = 0, 0
for step in range(first, 6):
    total += 1 / (step + 1)
    probe.step(step, total)
"""
REPORT = """\
    pathlib.Path("saved").mkdir(exist_ok=True)
    pathlib.Path("saved", "state.txt").write_text(f"{step + 1} {total!r}")
    drivetrain.report({"total": total}, drivetrain.Checkpoint.from_directory("saved"))
"""
RESUME = """\
if checkpoint := drivetrain.get_checkpoint():
    with checkpoint.as_directory() as directory:
        words = pathlib.Path(directory, "state.txt").read_text().split()
    first, total = int(words[0]), float(words[1])
"""
PORT = Port(
    name="sum",
    repository="owner/name",
    script="examples/sum.py",
    launcher=PYTHON,
    workers=1,
    prepare=(),
    changes=(
        Edit("import probe\n", "import drivetrain\nimport pathlib\nimport probe\n"),
        Edit("first = 0, 0\n", f"first = 0, 0\n{RESUME}"),
        Edit("probe.step(step, total)\n", f"probe.step(step, total)\n{REPORT}"),
    ),
    kill="0:3",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    checkout = tmp_path / "clone"
    program = checkout / PORT.script
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    author = ["-c", "user.name=author", "-c", "user.email=author@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "program"]):
        subprocess.run(["git", "-C", str(checkout), *arguments], check=True)
    return checkout


def test_losses_of_a_correct_port_are_equal_also_after_a_kill(checkout: Path, tmp_path: Path) -> None:
    row = compare(PORT, checkout, tmp_path / "runs")

    assert (row["unchanged"], row["losses"], row["resume"]) == ("equal", "equal", "equal")
    assert row["resumed_at"] == 3
    assert row["changed_lines"] == "+9 -0"


def test_a_port_that_does_not_restore_its_state_differs(checkout: Path, tmp_path: Path) -> None:
    forgets = Edit("first, total = int(words[0]), float(words[1])", "first = int(words[0])")
    row = compare(replace(PORT, resume_changes=(forgets,)), checkout, tmp_path / "runs")

    assert row["losses"] == "equal"
    assert str(row["resume"]).startswith("differ from step 3 (rank 0)")


def test_edits_of_another_version_of_the_program_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected 'a' once in the program, got it 2 times"):
        Edit("a", "b").apply("a a")


def test_names_of_ports_are_unique() -> None:
    assert len({port.name for port in PORTS}) == len(PORTS)


def test_page_has_the_results_of_every_port() -> None:
    page = (DOCS / "ported-programs.md").read_text()
    for port in PORTS:
        assert f"`{port.repository}`: [`{port.script}`]" in page
