"""Commands of other packages: only the selected one is imported, and a broken one is named."""

import sys

import pytest

from drivetrain_console import main
from tests.core.conftest import Install

COMMAND = """
from drivetrain_console import add_command, emit, find_run

def add(commands):
    parser = add_command(commands, "{name}", run, "print the id of a run", "  drivetrain {name} my_run")
    parser.add_argument("run")

def run(arguments):
    facts = find_run(arguments.run).read_json("run.json")
    emit(arguments, {{"id": facts.text("id")}}, lambda: "the run " + facts.text("id"))
    return 0
"""


@pytest.fixture
def command(install: Install) -> str:
    install(
        "id-dist", "id_command", COMMAND.format(name="show-id"), {"drivetrain.commands": {"show-id": "id_command:add"}}
    )
    return "show-id"


@pytest.fixture
def broken(install: Install) -> str:
    install("off-dist", "off_command", "raise SystemExit(3)", {"drivetrain.commands": {"off": "off_command:add"}})
    return "off"


def test_command_of_another_package_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "no-such-run"]) == 3
    assert "no-such-run: expected the directory or name of a run" in capsys.readouterr().err
    assert main([command, "no-such-run", "--json"]) == 3
    assert '"type": "MissingError"' in capsys.readouterr().err


def test_command_that_is_not_selected_is_not_imported(command: str) -> None:
    sys.modules.pop("id_command", None)  # another test may have imported it
    assert main(["explain", "DT-101"]) == 0
    assert "id_command" not in sys.modules


def test_help_lists_all_commands_and_why_one_cannot_be_used(
    command: str, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "show-id print the id of a run" in text
    assert "off cannot be used: [DT-602] the command 'off' of off-dist 1.2 cannot be loaded" in text
    assert "run" in text


def test_broken_command_is_named_when_it_is_selected(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([broken]) == 2
    assert "the command 'off' of off-dist 1.2 cannot be loaded from off_command:add: SystemExit: 3" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def add(): ...", "TypeError: add() takes 0 positional arguments but 1 was given"),
        ("def add(commands): raise SystemExit(3)", "SystemExit: 3"),
        ("def add(commands): commands.add_parser('runs')", "adds only the command 'faulty', got 'runs'"),
    ],
)
def test_command_whose_function_fails_breaks_no_other_command(
    source: str, reason: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("faulty-dist", "faulty_command", source, {"drivetrain.commands": {"faulty": "faulty_command:add"}})
    sys.modules.pop("faulty_command", None)

    assert main(["completion", "bash"]) == 0
    assert "_shtab_drivetrain_runs" in capsys.readouterr().out
    for arguments, status in ((["--help"], 0), (["rnus"], 2)):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == status
        capsys.readouterr()
    for command in ("faulty", "plugins"):
        assert main([command]) != 0
        text = " ".join("".join(capsys.readouterr()).split())
        assert "[DT-602] the command 'faulty' of faulty-dist 1.2, faulty_command:add: " in text
        assert reason in text


def test_unknown_command_lists_the_known_ones(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["show-ids"])
    assert end.value.code == 2
    assert "show-id" in capsys.readouterr().err
