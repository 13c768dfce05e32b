"""The conformance kit for commands: the built-in commands pass; broken ones are rejected by name of the mistake."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from drivetrain_testing import CommandConformance
from tests.core.conftest import Install
from tests.kits.rejecting import rejection


class TestCheckpoints(CommandConformance):
    name = "checkpoints"

    def make_arguments(self, run: Path) -> Sequence[str]:
        return ["list", str(run)]


class TestCompletion(CommandConformance):
    name = "completion"

    def make_arguments(self, run: Path) -> Sequence[str]:
        return ["bash"]


class TestDoctor(CommandConformance):
    name = "doctor"

    def make_arguments(self, run: Path) -> Sequence[str]:
        return ["--storage-path", str(run.parent)]


class TestExplain(CommandConformance):
    name = "explain"


class TestNewPlugin(CommandConformance):
    name = "new-plugin"

    def make_arguments(self, run: Path) -> Sequence[str]:
        return ["policy", "patient", "--directory", str(run.parent)]


class TestPlugins(CommandConformance):
    name = "plugins"


class TestRun(CommandConformance):
    name = "run"

    def make_arguments(self, run: Path) -> Sequence[str]:
        job = run.parent / "job.py"
        job.write_text("import drivetrain\n\ndef train():\n    drivetrain.report({'loss': 0.5})\n")
        return [f"{job}:train", "--storage-path", str(run.parent), "--name", "second"]


class TestRuns(CommandConformance):
    name = "runs"

    def make_arguments(self, run: Path) -> Sequence[str]:
        return ["show", str(run)]


class TestStacks(CommandConformance):
    name = "stacks"

    def make_arguments(self, run: Path) -> Sequence[str]:
        return [str(run)]  # which has ended, so the exit code is 1


COMMAND = """
from drivetrain_console import add_command, emit

def add(commands):
    add_command(commands, "{name}", run, "count to one", "  drivetrain {name}")

def run(arguments):
    emit(arguments, {{"count": 1}}, lambda: "one")
    return 0
"""

ADDS = "test_adds_one_command_with_its_name_and_a_summary"
RETURNS = "test_returns_an_exit_code"
BROKEN = {
    "two names": (
        ADDS,
        COMMAND.replace("def run", '    add_command(commands, "other", run, "count", "")\n\ndef run'),
        "adds only the command 'count-0', got 'count-0', 'other'",
    ),
    "another name": (ADDS, COMMAND.replace('"{name}"', '"one"'), "adds only the command 'count-1', got 'one'"),
    "no summary": (
        ADDS,
        "def add(commands):\n    commands.add_parser('{name}')",
        "expected a summary of 'count-2' in the list of commands, got none",
    ),
    "an exception": (
        ADDS,
        "def add(commands):\n    commands.add('{name}')",
        "count_3:add: AttributeError: ",
    ),
    "no exit code": (RETURNS, COMMAND.replace("return 0", "return None"), "expected an exit code, got None"),
    "no handler": (
        RETURNS,
        "def add(commands):\n    commands.add_parser('{name}', help='count')",
        "expected the exit code 0 or 1, got 2",
    ),
    "an exception in the handler": (
        RETURNS,
        COMMAND.replace("return 0", "1 / 0"),
        "expected an exit code, got ZeroDiv",
    ),
    "text instead of JSON": (
        "test_prints_json",
        COMMAND.replace('emit(arguments, {{"count": 1}}, lambda: "one")', 'print("one")'),
        "expected JSON on stdout with --json, got 'one",
    ),
    "a heavy import": (
        "test_is_added_without_heavy_imports",
        "import numpy\n" + COMMAND,
        "imports no framework, got imported: numpy. Import them in the handler",
    ),
}


@pytest.mark.parametrize(
    ("number", "test", "source", "message"),
    [(number, *case) for number, case in enumerate(BROKEN.values())],
    ids=BROKEN,
)
def test_broken_command_is_rejected(
    request: pytest.FixtureRequest, install: Install, number: int, test: str, source: str, message: str
) -> None:
    name, module = f"count-{number}", f"count_{number}"
    code = source.replace("{name}", name).replace("{{", "{").replace("}}", "}")
    install(f"{name}-dist", module, code, {"drivetrain.commands": {name: f"{module}:add"}})
    assert message in rejection(request, CommandConformance, test, name=name)


def test_class_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an attribute `name`"):
        type("TestNothing", (CommandConformance,), {})
